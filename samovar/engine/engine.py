"""Engine: schedule a step, launch it, read the one before. Knows no sockets, no clients and no text."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samovar.core.outputs import EngineStats, SequenceOutput
from samovar.core.request import Request
from samovar.core.step import PendingStep, ScheduledStep
from samovar.engine.executor import Executor
from samovar.errors import EngineDeadError, ValidationError
from samovar.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

CALLS = ("reset_prefix_cache", "block_usage")
"""What `Engine.call` answers to."""

MAX_FAILED_STEPS = 16
"""Whole steps that may fail in a row before the device counts as lost and the engine gives up."""


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that was submitted and whose result was not read yet."""

    step: ScheduledStep
    pending: PendingStep


class Engine:
    """One model's loop body. Not thread-safe: one thread calls everything.

    With `overlap`, step n + 1 is launched before result n is read, so that the devices never wait for Python; at most
    two steps are launched at a time, and a sequence has at most one token whose id is not known yet.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: Scheduler,
        *,
        overlap: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._depth = 2 if overlap else 1
        self._clock = clock
        self._launched: deque[_Launched] = deque()
        self._failed_in_a_row = 0
        self._stalled = False
        self._host_seconds = 0.0
        self._last_read: float | None = None

    @property
    def has_work(self) -> bool:
        """True while a sequence waits or runs, or a launched step has not been read."""
        return bool(self._launched) or self._scheduler.has_work

    @property
    def is_stalled(self) -> bool:
        """True if there is work but the last `step` found nothing to run: wait a little before the next one."""
        return self._stalled and self.has_work

    def add(self, request: Request) -> None:
        """Queue one request; its outputs come out of `step`."""
        self._scheduler.add(request)

    def abort(self, request_id: str, index: int | None = None) -> None:
        """Stop a request, or one choice of it, in whatever state it is; no output of it comes out any more.

        Unknown ids are no error: the request may just have ended by itself.
        """
        self._scheduler.abort(request_id, index)

    def step(self) -> list[SequenceOutput]:
        """Launch what can be launched, then wait for the oldest launched step and return its news."""
        while len(self._launched) < self._depth:
            step = self._scheduler.schedule(self._clock())
            if step is None:
                break
            self._launched.append(_Launched(step, self._executor.submit(step)))
        self._stalled = not self._launched
        if self._stalled:
            self._last_read = None
            return []
        launched = self._launched[0]
        if self._last_read is not None:
            self._host_seconds += time.perf_counter() - self._last_read
        try:
            result = launched.pending.result()
        except Exception as error:
            # The border to the devices: whatever a step raises ends the sequences of that step and nobody else's.
            self._launched.popleft()
            outputs = self._fail(launched.step, error)
            self._last_read = None
            return outputs
        self._last_read = time.perf_counter()
        self._launched.popleft()
        self._failed_in_a_row = 0
        outputs = self._scheduler.update(launched.step, result, self._clock())
        if not self.has_work:
            self._last_read = None
        return outputs

    def _fail(self, step: ScheduledStep, error: Exception) -> list[SequenceOutput]:
        self._failed_in_a_row += 1
        logger.error("step %d with %d sequences failed", step.step_id, len(step.sequences), exc_info=error)
        if self._failed_in_a_row >= MAX_FAILED_STEPS:
            raise EngineDeadError(f"{MAX_FAILED_STEPS} steps failed in a row, the last with: {error}") from error
        return self._scheduler.fail_step(step, f"the step failed: {error or type(error).__name__}")

    def prepare(self) -> bool:
        """Use a moment without work to make later steps faster; False once there is nothing left to prepare."""
        self._last_read = None
        return self._executor.prepare()

    def stats(self) -> EngineStats:
        """A snapshot for metrics."""
        stats = self._scheduler.stats()
        stats.host_seconds = self._host_seconds
        return stats

    def call(self, name: str) -> Any:
        """Answer one of `CALLS` with a plain value."""
        if name not in CALLS:
            raise ValidationError(
                f"unknown engine call {name!r}; known: {', '.join(CALLS)}", parameter="name", value=name
            )
        if name == "reset_prefix_cache":
            return self._scheduler.reset_prefix_cache()
        return self._scheduler.block_usage()

    def close(self) -> None:
        """Wait for the step that is running and end the executor; unfinished sequences are dropped."""
        self._launched.clear()
        self._executor.close()
