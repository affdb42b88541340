"""ProcessEngineClient: an EngineClient whose engine is a supervised child process. Torch-free, asyncio.

States: starting -> ready -> (dead -> starting -> ready)* -> closed. Death is noticed at once when the process ends, and
after a while when it stops making progress. Everything that waits then fails with `EngineDeadError`, what is left of
the process is killed, and a new one is started; a process that keeps dying is restarted ever more slowly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from samovar import errors
from samovar.config.engine import EngineConfig
from samovar.core.messages import CallResult, EngineMessage, Failed, FrontEndMessage, Outputs, Ready, Shutdown, Starting
from samovar.core.outputs import EngineInfo, EngineStats, SequenceOutput
from samovar.core.request import Request
from samovar.engine.child import ENTRY, EngineChild
from samovar.engine.conversation import Conversation
from samovar.errors import EngineDeadError, SamovarError

logger = logging.getLogger(__name__)

TICK_SECONDS = 0.1
"""How often the watchdog looks at the process."""
FROZEN_SECONDS = 3.0
"""How long a process may be stopped by a signal before it counts as stuck."""
SHUTDOWN_SECONDS = 5.0
"""How long a process may take to leave by itself after `Shutdown`."""
FIRST_BACKOFF, LAST_BACKOFF = 0.5, 30.0
"""Seconds before the second restart in a row, and the most there will be."""
HEALTHY_SECONDS = 60.0
"""A process that lived this long was fine: the next restart is immediate again."""

_SHUT_DOWN = "the engine is shut down"


class ProcessEngineClient:
    """Starts, feeds and supervises one engine process.

    Call `start` first, on the event loop that will use the client. `engine_timeout` is how many seconds the engine may
    go without finishing a step while requests are live, or without a sign of progress while it starts. `on_phase` hears
    each phase of every start as it begins. `entry` is the
    module run as the engine process. `first` is a process for the same configuration that was started already.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        engine_timeout: float = 120.0,
        restart: bool = True,
        on_phase: Callable[[str], None] | None = None,
        log_level: str = "INFO",
        entry: str = ENTRY,
        first: EngineChild | None = None,
    ) -> None:
        self._config = config
        self._prepared = first
        self._engine_timeout = engine_timeout
        self._restart = restart
        self._on_phase = on_phase
        self._log_level = log_level
        self._entry = entry
        self._conversation = Conversation(config.scheduler, self._send)
        self._child: EngineChild | None = None
        self._phase = ""
        self._last_sign = 0.0
        self._info: EngineInfo | None = None
        self._is_closed = False
        self._supervisor: asyncio.Task[None] | None = None
        self._first_start: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start the engine and wait until it is ready. Raises what made it fail (`CheckpointError`, ...)."""
        if self._supervisor is not None or self._is_closed:
            raise EngineDeadError("an engine client is started once; make a new one")
        self._first_start = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        self._supervisor.add_done_callback(self._supervision_ended)
        try:
            await asyncio.shield(self._first_start)
        except BaseException:
            # Failed or cancelled: either way no process may stay behind.
            await self.close()
            raise

    @property
    def info(self) -> EngineInfo:
        """Facts about the loaded model; known once the engine was ready for the first time."""
        if self._info is None:
            raise EngineDeadError("the engine is still starting")
        return self._info

    @property
    def stats(self) -> EngineStats:
        """The latest snapshot."""
        return self._conversation.stats

    @property
    def is_alive(self) -> bool:
        """False once the process died or got stuck, until its successor is ready."""
        return self._conversation.is_open and self._child is not None and self._child.exit_status is None

    @property
    def is_ready(self) -> bool:
        """True while requests are accepted."""
        return self.is_alive and not self._is_closed

    @property
    def pid(self) -> int | None:
        """Process id of the engine, None when there is none."""
        return None if self._child is None else self._child.pid

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
        return await self._conversation.call(name, arguments, timeout=self._engine_timeout)

    def on_stats(self, listener: Callable[[EngineStats], None]) -> None:
        """Call `listener` with every snapshot that arrives."""
        self._conversation.on_stats(listener)

    async def close(self) -> None:
        """Stop the engine; returns when its process is gone. Live requests fail."""
        self._is_closed = True
        was_ready = self._conversation.is_open
        self._conversation.close(_SHUT_DOWN)
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait([self._supervisor])
        if self._first_start is not None and not self._first_start.done():
            self._first_start.set_exception(EngineDeadError(_SHUT_DOWN))
            self._first_start.exception()  # Seen: nobody may be waiting any more.
        child, self._child = self._child or self._prepared, None
        self._prepared = None
        if child is not None:
            if was_ready and not child.is_stopped:
                child.send(Shutdown())
                await child.wait(SHUTDOWN_SECONDS)
            await child.destroy()

    def _send(self, message: FrontEndMessage) -> None:
        if self._child is not None:
            self._child.send(message)

    # --- supervision

    async def _supervise(self) -> None:
        """One process after the other, until one fails to start for the first time or `close` cancels us."""
        assert self._first_start is not None
        loop = asyncio.get_running_loop()
        backoff = 0.0
        while True:
            started = loop.time()
            reason, error = await self._serve_one()
            if not self._first_start.done():
                self._first_start.set_exception(error or EngineDeadError(reason))
                return
            if not self._restart:
                return
            if loop.time() - started > HEALTHY_SECONDS:
                backoff = 0.0
            logger.error("%s; restarting it in %.1f s", reason, backoff)
            await asyncio.sleep(backoff)
            backoff = min(LAST_BACKOFF, max(FIRST_BACKOFF, 2 * backoff))

    def _supervision_ended(self, task: asyncio.Task[None]) -> None:
        """If the supervisor itself broke, say so and fail what waits: nobody would notice a dead engine any more."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        reason = f"the engine's supervisor failed: {type(error).__name__}: {error}"
        logger.error(reason, exc_info=error)
        self._conversation.close(reason)
        if self._first_start is not None and not self._first_start.done():
            self._first_start.set_exception(EngineDeadError(reason))

    async def _serve_one(self) -> tuple[str, SamovarError | None]:
        """One process, from start to reaped; returns why it ended, and the error it reported itself."""
        try:
            self._phase, self._last_sign = "starting the process", asyncio.get_running_loop().time()
            child, self._prepared = self._prepared, None
            if child is None:
                child = EngineChild(self._config, entry=self._entry, log_level=self._log_level)
            self._child = child
        except OSError as error:
            return f"the engine process could not be started: {error}", None
        reason, reported = await self._run(child)
        self._conversation.close(reason)
        await child.destroy()
        self._child = None
        return reason, reported

    async def _run(self, child: EngineChild) -> tuple[str, SamovarError | None]:
        """Serve one process until it is dead or stuck."""
        reader = asyncio.create_task(self._read(child), name="engine-reader")
        watchdog = asyncio.create_task(self._watch(child), name="engine-watchdog")
        try:
            await asyncio.wait([reader, watchdog], return_when=asyncio.FIRST_COMPLETED)
            # A process that ended may have said why: what is still in the socket counts first.
            await asyncio.wait([reader], timeout=TICK_SECONDS)
            if reader.done():
                error = reader.result()
                return f"the engine failed: {error}", error
            return watchdog.result(), None
        finally:
            reader.cancel()
            watchdog.cancel()
            await asyncio.wait([reader, watchdog])

    async def _read(self, child: EngineChild) -> SamovarError:
        """Take in messages until the engine reports a failure."""
        while True:
            message = await child.receive()
            if isinstance(message, Failed):
                return _error_of(message)
            self._take(message)

    def _take(self, message: EngineMessage) -> None:
        if isinstance(message, Outputs | CallResult):
            self._conversation.take(message)
        elif isinstance(message, Starting):
            self._take_phase(message.phase)
        elif isinstance(message, Ready):
            self._info = message.info
            self._conversation.open(message.info.max_num_seqs)
            if self._first_start is not None and not self._first_start.done():
                self._first_start.set_result(None)

    def _take_phase(self, phase: str) -> None:
        """A phase of start-up began; or, if it is the same one, made progress."""
        is_new = phase != self._phase
        self._phase, self._last_sign = phase, asyncio.get_running_loop().time()
        if is_new and self._on_phase is not None:
            self._on_phase(phase)

    async def _watch(self, child: EngineChild) -> str:
        """Return, in words, what is wrong as soon as something is."""
        loop = asyncio.get_running_loop()
        last_tick = loop.time()
        frozen_since: float | None = None
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = loop.time()
            if now - last_tick > 5 * TICK_SECONDS:
                # We were held up ourselves (stopped, suspended, a busy event loop): no reproach to the engine.
                self._conversation.last_progress += now - last_tick
                self._last_sign += now - last_tick
                frozen_since = None
            last_tick = now
            if child.exit_status is not None:
                return f"the engine process ended with status {child.exit_status}"
            if not child.is_stopped:
                frozen_since = None
            elif frozen_since is None:
                frozen_since = now
            elif now - frozen_since > min(FROZEN_SECONDS, self._engine_timeout):
                return "the engine process is stopped by a signal"
            if self._conversation.is_waiting and now - self._conversation.last_progress > self._engine_timeout:
                return f"the engine finished no step for {self._engine_timeout:g} s"
            if not self._conversation.is_open and now - self._last_sign > self._engine_timeout:
                return (
                    f"the engine made no progress for {self._engine_timeout:g} s while it was {self._phase}; "
                    f"if the machine is only slow, raise --engine-timeout"
                )


def _error_of(failure: Failed) -> SamovarError:
    """The exception a `Failed` message stands for."""
    kind = getattr(errors, failure.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, SamovarError)) or kind is errors.OverloadedError:
        return EngineDeadError(f"{failure.kind}: {failure.message}")
    return kind(failure.message)
