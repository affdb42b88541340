"""Engine: schedule a step, launch it, read the one before. Knows no sockets, no clients and no text."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from samovar.core.outputs import EngineStats, SequenceOutput
from samovar.core.request import Request
from samovar.core.step import PendingStep, ScheduledStep
from samovar.engine import calls
from samovar.engine.executor import Executor
from samovar.engine.standby import Standby
from samovar.errors import EngineDeadError
from samovar.schedule.scheduler import Scheduler

logger = logging.getLogger(__name__)

STALL_SECONDS = 0.001
"""How long to wait, where nobody else does it, when sequences wait but none can run."""

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
        facts: dict[str, Any] | None = None,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self.standby = Standby(executor, scheduler, self)
        """Whether it is paused or asleep."""
        self.facts = facts or {}
        """Settings and choices, for people: part of what `server_info` answers."""
        self._on_close = on_close
        self._news: list[SequenceOutput] = []
        self._depth = 2 if overlap else 1
        self._clock = clock
        self._launched: deque[_Launched] = deque()
        self._failed_in_a_row = 0
        self._stalled = False
        self._host_seconds = 0.0
        self._last_read: float | None = None

    @property
    def has_work(self) -> bool:
        """True while `step` has something to do: a sequence waits or runs, unless the engine is paused, or there is news."""
        if self._launched or self._news:
            return True
        return self._scheduler.has_work and not self.standby.is_paused

    @property
    def executor(self) -> Executor:
        """What runs its steps."""
        return self._executor

    @property
    def scheduler(self) -> Scheduler:
        """What decides about them."""
        return self._scheduler

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

    def step(self, meanwhile: Callable[[], None] | None = None) -> list[SequenceOutput]:
        """Launch what can be launched, then wait for the oldest launched step and return its news.

        `meanwhile` is called between the two, while the device works: the place for what can be done about earlier news.
        """
        news, self._news = self._news, []
        if not self.standby.is_paused:
            news += self._scheduler.let_in()
            self._launch()
        if meanwhile is not None:
            meanwhile()
        self._stalled = not self._launched
        if self._stalled:
            self._last_read = None
            return news
        outputs = self._read()
        return news + outputs if news else outputs

    def _launch(self) -> None:
        while len(self._launched) < self._depth:
            step = self._scheduler.schedule(self._clock())
            if step is None:
                return
            self._launched.append(_Launched(step, self._executor.submit(step)))

    def _read(self) -> list[SequenceOutput]:
        """Wait for the oldest launched step and book it."""
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
        stats.is_paused, stats.refuses = self.standby.is_paused, self.standby.refuses
        return stats

    def call(self, name: str, **arguments: Any) -> Any:
        """Answer one of the calls listed in `engine.client` with a plain value. What it ends is told by the next `step`.

        One that waits for live requests makes the steps they need.
        """
        return calls.answer(self, name, arguments)

    def can_answer(self, name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether `call` need not wait for live requests to end; if it must, no new ones are wanted from now on."""
        mode = calls.waits(name, arguments)
        return mode is None or self.standby.is_dry(mode)

    # What its standby needs.

    def settle(self) -> None:
        """Book every step that is under way; the news come with the next `step`."""
        while self._launched:
            self._news += self._read()
        self._last_read = None

    def run_dry(self) -> None:
        """Make steps until no request is left; the news come with the next `step`."""
        while self._scheduler.has_work:
            self._news = self.step()
            if self.is_stalled:
                time.sleep(STALL_SECONDS)

    def tell(self, outputs: Iterable[SequenceOutput]) -> None:
        """Hand these out with the next `step`'s."""
        self._news += outputs

    def close(self) -> None:
        """Wait for the step that is running and end the executor; unfinished sequences are dropped."""
        self._launched.clear()
        self._executor.close()
        if self._on_close is not None:
            self._on_close()
