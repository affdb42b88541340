"""StreamExecutor: one worker whose device has a queue of its own; everything happens on the caller's thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from samovar.core.cache_spec import CacheSpec
from samovar.core.step import PendingStep, ScheduledStep, StepResult
from samovar.engine.executor import SHOWS_PROGRESS, WORKER_CALLS
from samovar.hardware import device

logger = logging.getLogger(__name__)


class LaunchingWorker(Protocol):
    """What this executor needs of a worker."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def cache_specs(self) -> list[CacheSpec]: ...

    def launch(self, step: ScheduledStep) -> PendingStep: ...

    def prepare(self) -> bool: ...

    def synchronize(self) -> None: ...


@dataclass(frozen=True, slots=True)
class FailedLaunch:
    """A step that could not be queued."""

    error: Exception

    def result(self) -> StepResult:
        """Raise the reason, where the engine looks for failures of steps."""
        raise self.error


class StreamExecutor:
    """Queues steps on the device at once; no thread, because queueing does not wait."""

    def __init__(self, worker: LaunchingWorker) -> None:
        self._open_worker: LaunchingWorker | None = worker

    @property
    def _worker(self) -> LaunchingWorker:
        if self._open_worker is None:
            raise RuntimeError("the executor is closed")
        return self._open_worker

    @property
    def num_blocks(self) -> int:
        """Cache blocks the worker holds."""
        return self._worker.num_blocks

    @property
    def cache_specs(self) -> list[CacheSpec]:
        """What each layer caches."""
        return self._worker.cache_specs

    def submit(self, step: ScheduledStep) -> PendingStep:
        """Queue one step behind those already submitted."""
        try:
            return self._worker.launch(step)
        except Exception as error:
            # Whatever a step raises is its result; the engine decides what becomes of it.
            return FailedLaunch(error)

    def prepare(self) -> bool:
        """See `Executor`."""
        return self._worker.prepare()

    def call(self, name: str, *arguments: Any, sign: Callable[[], None] | None = None) -> Any:
        """See `Executor`."""
        assert name in WORKER_CALLS, name
        method = getattr(self._worker, name)
        if sign is None or name not in SHOWS_PROGRESS:
            return method(*arguments)

        def listen(done: int, total: int) -> None:
            sign()

        return method(*arguments, listen)

    def close(self) -> None:
        """Wait for the steps that were queued, and let go of the worker, so that another engine finds its memory free.

        A lost device is logged: whoever waits for a step has been told.
        """
        worker, self._open_worker = self._open_worker, None
        if worker is None:
            return
        try:
            worker.synchronize()
            del worker
            device.release_memory()
        except RuntimeError:
            logger.exception("the device failed before it was closed")
