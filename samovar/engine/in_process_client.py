"""InProcessEngineClient: the same EngineClient with the engine on a thread of this process, for debugging and tests."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Any

from samovar.config.groups import SchedulerConfig
from samovar.core.messages import CallResult, EngineMessage, FrontEndMessage, Outputs, Shutdown
from samovar.core.outputs import EngineInfo, EngineStats, SequenceOutput
from samovar.core.request import Request
from samovar.engine.conversation import Conversation
from samovar.engine.engine import Engine
from samovar.engine.loop import EngineLoop

logger = logging.getLogger(__name__)


class ThreadChannel:
    """A channel between the engine's thread and an event loop of the same process."""

    def __init__(self, loop: asyncio.AbstractEventLoop, deliver: Callable[[EngineMessage], None]) -> None:
        self._loop = loop
        self._deliver = deliver
        self._messages: deque[FrontEndMessage] = deque()
        self._changed = threading.Condition()

    def put(self, message: FrontEndMessage) -> None:
        """Front end's side: queue one message."""
        with self._changed:
            self._messages.append(message)
            self._changed.notify()

    def receive(self, timeout: float | None) -> list[FrontEndMessage]:
        """Engine's side: every message that is there, after waiting up to `timeout` seconds for the first."""
        with self._changed:
            if not self._messages and timeout != 0.0:
                self._changed.wait(timeout)
            messages = list(self._messages)
            self._messages.clear()
        return messages

    def send(self, message: EngineMessage) -> None:
        """Engine's side: hand a message to the event loop."""
        self.post(self._deliver, message)

    def post(self, function: Callable[..., None], *args: object) -> None:
        """Run `function` on the event loop; dropped if the loop is closed, because then nobody listens."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)


class InProcessEngineClient:
    """An EngineClient without a process border: same messages, same conversation, one thread.

    Make it on the event loop that will use it. Without a border there is no restart: a broken engine stays broken.
    """

    def __init__(self, engine: Engine, info: EngineInfo, *, limits: SchedulerConfig | None = None) -> None:
        self._engine = engine
        self._info = info
        self._channel = ThreadChannel(asyncio.get_running_loop(), self._take)
        self._conversation = Conversation(limits or SchedulerConfig(max_num_seqs=info.max_num_seqs), self._channel.put)
        self._conversation.open()
        self._thread = threading.Thread(target=self._run, name="samovar-engine", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        message = "the engine is shut down"
        try:
            EngineLoop(self._engine, self._channel).run()
        except Exception as error:
            # The top of the engine's thread: whoever waits must hear of it.
            logger.exception("the engine failed")
            message = f"the engine failed: {error}"
        self._engine.close()
        self._channel.post(self._conversation.close, message)

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model."""
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot."""
        return self._conversation.stats

    @property
    def is_alive(self) -> bool:
        """False once the engine's thread ended."""
        return self._conversation.is_open

    @property
    def is_ready(self) -> bool:
        """True while requests are accepted."""
        return self._conversation.is_open

    def generate(self, request: Request) -> AsyncGenerator[SequenceOutput, None]:
        """Outputs of every choice, interleaved; see `EngineClient.generate`."""
        return self._conversation.generate(request)

    async def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request or one choice of it."""
        self._conversation.abort(request_id, index)

    @property
    def refuses(self) -> str | None:
        """Why new requests are refused although the engine lives."""
        return self._conversation.refuses

    async def call(self, name: str, **arguments: Any) -> Any:
        """Run one of the engine's named calls and return its value; see `engine.client`."""
        return await self._conversation.call(name, arguments)

    def on_stats(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with every snapshot that arrives."""
        self._conversation.on_stats(listener)

    async def close(self) -> None:
        """Stop the engine and wait for its thread. Live requests fail."""
        self._conversation.close("the engine is shut down")
        self._channel.put(Shutdown())
        await asyncio.to_thread(self._thread.join)

    def _take(self, message: EngineMessage) -> None:
        if isinstance(message, Outputs | CallResult):
            self._conversation.take(message)
