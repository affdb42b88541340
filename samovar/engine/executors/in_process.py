"""InProcessExecutor: one worker, driven by one thread of this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from samovar.core.cache_spec import CacheSpec
from samovar.core.step import ScheduledStep, StepResult
from samovar.engine.executor import WORKER_CALLS

SIGN_SECONDS = 0.3
"""How often a long call shows that it goes on."""


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

    def call(self, name: str, *arguments: Any, sign: Callable[[], None] | None = None) -> Any:
        """See `Executor`."""
        assert name in WORKER_CALLS, name
        answer = self._thread.submit(getattr(self._worker, name), *arguments)
        while True:
            try:
                return answer.result(SIGN_SECONDS)
            except TimeoutError:
                if answer.done():
                    return answer.result()
            if sign is not None:
                sign()

    def close(self) -> None:
        """Finish the step that is running, drop those behind it, and end the thread."""
        self._thread.shutdown(wait=True, cancel_futures=True)
