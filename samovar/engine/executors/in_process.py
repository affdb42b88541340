"""InProcessExecutor: one worker, driven by one thread of this process."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

from samovar.core.cache_spec import CacheSpec
from samovar.core.step import ScheduledStep, StepResult


class StepWorker(Protocol):
    """What an executor needs of a worker."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def cache_specs(self) -> list[CacheSpec]: ...

    def execute(self, step: ScheduledStep) -> StepResult: ...


class InProcessExecutor:
    """Runs steps one after the other on a single thread, so that Python plans step n + 1 while kernels run step n.

    Kernels release the GIL. Nothing but this thread touches the worker once steps are submitted.
    """

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samovar-worker")

    @property
    def num_blocks(self) -> int:
        """Cache blocks the worker holds."""
        return self._worker.num_blocks

    @property
    def cache_specs(self) -> list[CacheSpec]:
        """What each layer caches."""
        return self._worker.cache_specs

    def submit(self, step: ScheduledStep) -> Future[StepResult]:
        """Queue one step behind those already submitted."""
        return self._thread.submit(self._worker.execute, step)

    def prepare(self) -> bool:
        """Nothing: a step on the CPU is as fast the first time."""
        return False

    def close(self) -> None:
        """Finish the step that is running, drop those behind it, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
