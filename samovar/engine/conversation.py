"""Conversation: the front end's half of the talk with one engine. Live requests, calls, statistics, queue limits.

Belongs to one asyncio event loop; every method is called on it. Torch-free. Both clients are a transport around this.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from samovar import errors
from samovar.config.groups import SchedulerConfig
from samovar.config.resolve import DEFAULT_NUM_SEQS
from samovar.core.messages import AbortRequest, AddRequest, Call, CallResult, FrontEndMessage, Outputs
from samovar.core.outputs import EngineStats, SequenceOutput
from samovar.core.request import Request
from samovar.errors import EngineDeadError, OverloadedError, ValidationError

OVERLOAD_REASONS = ("queue_requests", "queue_tokens", "paused")
"""Every `OverloadedError.reason` an engine client raises."""

TOTALS = (
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "num_steps",
    "prompt_tokens",
    "generation_tokens",
    "step_seconds",
)
"""The running totals of `EngineStats`: they must never fall, also when an engine is replaced."""


@dataclass(slots=True, eq=False)
class _Live:
    """One request that has not ended."""

    request: Request
    open_choices: set[int]
    news: deque[SequenceOutput] = field(default_factory=deque)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    is_queued: bool = True
    error: Exception | None = None


class Conversation:
    """Hands each message of the engine to the request or call it belongs to.

    It starts closed; a closed conversation refuses requests and calls with `EngineDeadError`.
    """

    def __init__(self, limits: SchedulerConfig, send: Callable[[FrontEndMessage], None]) -> None:
        self._limits = limits
        self._most_running = limits.max_num_seqs or DEFAULT_NUM_SEQS
        self._send = send
        self._live: dict[str, _Live] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count(1)
        self._listeners: list[Callable[[EngineStats], None]] = []
        self._queued_reqs = 0
        self._queued_tokens = 0
        self._closed_because: str | None = "the engine is still starting"
        self._earlier = EngineStats()
        self.stats = EngineStats()
        """The latest snapshot; its running totals include those of engines that died."""
        self.last_progress = 0.0
        """`loop.time()` of the last step, or of the moment the engine got something to do."""

    @property
    def is_open(self) -> bool:
        """True while requests are accepted."""
        return self._closed_because is None

    @property
    def is_waiting(self) -> bool:
        """True while the engine owes an answer; a paused one owes none to requests."""
        return bool(self._calls or (self._live and not self.stats.is_paused))

    @property
    def refuses(self) -> str | None:
        """Why new requests are refused although the engine lives."""
        return None if self._closed_because is not None else self.stats.refuses

    def open(self, max_num_seqs: int | None = None) -> None:
        """Accept requests from now on, for an engine that runs `max_num_seqs` sequences at once."""
        self._most_running = max_num_seqs or self._most_running
        self._closed_because = None

    def close(self, message: str) -> None:
        """Refuse new requests, and end every live one and every call with `EngineDeadError`."""
        self._closed_because = message
        lost, self._live = list(self._live.values()), {}
        self._queued_reqs = self._queued_tokens = 0
        for live in lost:
            live.open_choices.clear()
            live.error = EngineDeadError(message)
            live.changed.set()
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(EngineDeadError(message))
        self._earlier = self.stats
        self._publish(EngineStats(num_blocks=self.stats.num_blocks, num_free_blocks=self.stats.num_blocks))

    def on_stats(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with every snapshot that arrives."""
        self._listeners.append(listener)

    # --- requests

    async def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        """Send the request and yield its outputs until every choice ended; closing early aborts it."""
        live = self._enter(request)
        try:
            while True:
                while live.news:
                    yield live.news.popleft()
                if live.error is not None:
                    raise live.error
                if not live.open_choices:
                    return
                live.changed.clear()
                await live.changed.wait()
        finally:
            self._leave(live)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request or one of its choices; its iterator ends once every choice has."""
        live = self._live.get(request_id)
        if live is None:
            return
        stopped = set(live.open_choices) if index is None else live.open_choices & {index}
        if not stopped:
            return
        live.open_choices -= stopped
        live.news = deque(output for output in live.news if output.index not in stopped)
        self._send(AbortRequest(request_id, index))
        live.changed.set()

    def _enter(self, request: Request) -> _Live:
        if self._closed_because is not None:
            raise EngineDeadError(self._closed_because)
        if request.request_id in self._live:
            raise ValidationError(f"request id {request.request_id!r} is already running", parameter="request_id")
        self._check_room(request)
        self._wake()
        self._send(AddRequest(request))
        live = self._live[request.request_id] = _Live(request, set(range(request.params.n)))
        self._queued_reqs += 1
        self._queued_tokens += len(request.prompt_token_ids)
        return live

    def _check_room(self, request: Request) -> None:
        if self.stats.refuses is not None:
            raise OverloadedError(self.stats.refuses, reason="paused")
        can_start = max(0, self._most_running - (len(self._live) - self._queued_reqs))
        most = self._limits.max_num_queued_reqs
        if self._queued_reqs >= most + can_start or self.stats.num_waiting > most:
            message = f"{self._queued_reqs} requests are waiting (--max-num-queued-reqs {most}); retry later"
            raise OverloadedError(message, reason="queue_requests")
        wanted, most = self._queued_tokens + len(request.prompt_token_ids), self._limits.max_num_queued_tokens
        if self._queued_reqs and wanted > most:
            message = f"{self._queued_tokens} prompt tokens are waiting (--max-num-queued-tokens {most}); retry later"
            raise OverloadedError(message, reason="queue_tokens")

    def _leave(self, live: _Live) -> None:
        request_id = live.request.request_id
        if self._live.get(request_id) is not live:
            return
        del self._live[request_id]
        self._leave_queue(live)
        if live.open_choices:
            self._send(AbortRequest(request_id))

    def _leave_queue(self, live: _Live) -> None:
        if live.is_queued:
            live.is_queued = False
            self._queued_reqs -= 1
            self._queued_tokens -= len(live.request.prompt_token_ids)

    # --- calls

    async def call(self, name: str, arguments: Mapping[str, Any], *, timeout: float | None = None) -> Any:
        """Run one of the engine's named calls and return its value.

        Raises what `engine.client` says of calls; `EngineDeadError` after `timeout` seconds without a sign of life.
        """
        if self._closed_because is not None:
            raise EngineDeadError(self._closed_because)
        self._wake()
        call_id = next(self._call_ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self._send(Call(call_id, name, dict(arguments)))
            waited = 0.0
            while not answer.done() and (timeout is None or waited < timeout):
                await asyncio.wait([answer], timeout=None if timeout is None else timeout - waited)
                waited = asyncio.get_running_loop().time() - self.last_progress
            if not answer.done():
                raise EngineDeadError(f"the engine did not answer {name!r} within {timeout} s")
            return answer.result()
        finally:
            del self._calls[call_id]

    # --- what the engine says

    def take(self, message: Outputs | CallResult) -> None:
        """Pass on one message; outputs and answers nobody waits for any more are dropped."""
        self.last_progress = asyncio.get_running_loop().time()
        if isinstance(message, CallResult):
            self._take_answer(message)
            return
        for output in message.outputs:
            live = self._live.get(output.request_id)
            if live is None or output.index not in live.open_choices:
                continue
            self._leave_queue(live)
            if output.refused is not None:
                live.open_choices.clear()
                live.error = OverloadedError(output.error or "the engine is paused", reason=output.refused)
                live.changed.set()
                continue
            if output.finish_reason is not None:
                live.open_choices.discard(output.index)
            live.news.append(output)
            live.changed.set()
        self._publish(message.stats)

    def _take_answer(self, message: CallResult) -> None:
        answer = self._calls.get(message.call_id)
        if answer is None or answer.done():
            return
        if message.error is None:
            answer.set_result(message.value)
        else:
            kind = getattr(errors, message.kind, ValidationError)
            is_refusal = isinstance(kind, type) and issubclass(kind, ValidationError)
            answer.set_exception(kind(message.error) if is_refusal else ValidationError(message.error))

    def _wake(self) -> None:
        """An idle engine owes nothing: its time starts with the first thing it is asked."""
        if not self.is_waiting:
            self.last_progress = asyncio.get_running_loop().time()

    def _publish(self, stats: EngineStats) -> None:
        totals = {name: getattr(stats, name) + getattr(self._earlier, name) for name in TOTALS}
        self.stats = stats = replace(stats, **totals)
        for listener in self._listeners:
            listener(stats)
