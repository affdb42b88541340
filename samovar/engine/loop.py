"""EngineLoop: reads messages between steps, runs the engine while there is work, and sleeps when there is none."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from samovar.core.messages import (
    AbortRequest,
    AddRequest,
    Call,
    CallResult,
    EngineMessage,
    FrontEndMessage,
    Outputs,
    Shutdown,
)
from samovar.core.outputs import SequenceOutput
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.engine.engine import Engine
from samovar.errors import SamovarError

logger = logging.getLogger(__name__)

STALL_SECONDS = 0.005
"""How long to wait for a message when sequences wait but none can run."""

IDLE_SECONDS = 0.2
"""How long nothing must have happened before idle time is used to prepare; a request that comes then waits for it."""


SIGN_SECONDS = 0.3
"""How often something long shows that it goes on; well below the shortest `engine_timeout`."""


class Channel(Protocol):
    """Both directions to one front end, seen from the engine."""

    def receive(self, timeout: float | None) -> list[FrontEndMessage]:
        """Every message that is there. Waits up to `timeout` seconds for the first (None: as long as it takes)."""
        ...

    def send(self, message: EngineMessage) -> None: ...


class EngineLoop:
    """Owns one engine and serves one channel until `Shutdown` arrives.

    Messages are read between steps, so an abort is honoured before the next step is scheduled. An idle loop blocks in
    `receive`, once the engine has nothing left to prepare. The news of a step are sent while the next one runs.
    """

    def __init__(self, engine: Engine, channel: Channel) -> None:
        self._engine = engine
        self._channel = channel
        self._news: list[SequenceOutput] = []
        self._has_news = False
        self._can_prepare = True
        self._calls: list[Call] = []
        self._last_sign = 0.0
        engine.standby.sign = self._sign

    def run(self) -> None:
        """Serve until `Shutdown`. An exception that leaves here means the engine is broken for good."""
        while True:
            messages = self._channel.receive(self._patience())
            for message in messages:
                if isinstance(message, Shutdown):
                    self._tell()
                    return
                self._apply(message)
            self._answer_calls()
            engine = self._engine
            if engine.has_work:
                outputs = engine.step(self._tell)
                self._news, self._has_news = outputs, True
                if engine.has_work and not engine.is_stalled:
                    continue
            elif not (self._news or messages):
                self._can_prepare = engine.prepare()
                continue
            self._has_news = True
            self._tell()

    def _tell(self) -> None:
        """Send what there is to tell."""
        if self._has_news:
            news, self._news, self._has_news = self._news, [], False
            self._channel.send(Outputs(outputs=news, stats=self._engine.stats()))

    def _patience(self) -> float | None:
        if not self._engine.has_work:
            if self._calls:  # They waited for the work that has just ended.
                return 0.0
            return IDLE_SECONDS if self._can_prepare else None
        return STALL_SECONDS if self._engine.is_stalled else 0.0

    def _apply(self, message: FrontEndMessage) -> None:
        if isinstance(message, AddRequest):
            if self._calls:  # In the order they were sent: one may be a pause.
                self._answer_calls()
            self._add(message.request)
        elif isinstance(message, AbortRequest):
            self._engine.abort(message.request_id, message.index)
        elif isinstance(message, Call):
            self._calls.append(message)

    def _add(self, request: Request) -> None:
        # The front end knows of a pause a moment later than we do: what it sent meanwhile would wait for the end of it.
        if (reason := self._engine.standby.refuses) is not None:
            self._refuse(request, reason, refused="paused")
            return
        try:
            self._engine.add(request)
        except SamovarError as error:
            self._refuse(request, str(error))

    def _refuse(self, request: Request, error: str, refused: str | None = None) -> None:
        self._has_news = True
        self._news += [
            SequenceOutput(
                request.request_id, index, [], finish_reason=FinishReason.ERROR, error=error, refused=refused
            )
            for index in range(request.params.n)
        ]

    def _answer_calls(self) -> None:
        """Answer the calls that need not wait for live requests any more."""
        if not self._calls:
            return
        self._tell()
        waiting = []
        for call in self._calls:
            result = self._answer(call)
            if result is None:
                waiting.append(call)
                continue
            # The front end must know of a pause before whoever asked for it goes on.
            self._channel.send(Outputs(outputs=[], stats=self._engine.stats()))
            self._channel.send(result)
            self._can_prepare = True
        self._calls = waiting

    def _answer(self, call: Call) -> CallResult | None:
        try:
            if not self._engine.can_answer(call.name, call.arguments):
                return None
            return CallResult(call.call_id, value=self._engine.call(call.name, **call.arguments))
        except SamovarError as error:
            return CallResult(call.call_id, error=str(error), kind=type(error).__name__)

    def _sign(self) -> None:
        """Show that something long goes on."""
        now = time.monotonic()
        if now - self._last_sign >= SIGN_SECONDS:
            self._last_sign = now
            self._channel.send(Outputs(outputs=[], stats=self._engine.stats()))
