"""InProcessExecutor: one worker, driven by one thread of this process."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from samovar.core.cache_spec import CacheSpec
from samovar.core.step import ScheduledStep, StepResult
from samovar.engine.executor import WORKER_CALLS

SIGN_SECONDS = 0.3
"""How often a long call shows that it goes on."""

T = TypeVar("T")


class StepWorker(Protocol):
    """What an executor needs of a worker."""

    @property
    def num_blocks(self) -> int: ...

    @property
    def cache_specs(self) -> list[CacheSpec]: ...

    def execute(self, step: ScheduledStep) -> StepResult: ...


class Task(Generic[T]):
    """A call that the thread makes once its turn comes; one thread waits for it.

    Steps of small models are so short that the conditions and callbacks of a `concurrent.futures.Future` would show.
    """

    __slots__ = ("_arguments", "_done", "_error", "_function", "_given")

    def __init__(self, function: Callable[..., T], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments
        self._error: Exception | None = None
        self._done = threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """Make the call; what it raises is for whoever waits."""
        try:
            self._given = self._function(*self._arguments)
        except Exception as error:
            # The border between threads: whatever it is belongs to the one who waits.
            self._error = error
        finally:
            self._done.release()

    def drop(self) -> None:
        """There will be no call."""
        self._error = RuntimeError("the executor was closed before this step ran")
        self._done.release()

    def is_over(self, timeout: float) -> bool:
        """Whether it was over within `timeout` seconds."""
        if not self._done.acquire(timeout=timeout):
            return False
        self._done.release()
        return True

    def result(self) -> T:
        """Wait for the call, and give what it gave."""
        with self._done:
            if self._error is not None:
                raise self._error
            return self._given


Tasks = SimpleQueue[Task[Any] | None]


def _serve(tasks: Tasks) -> None:
    """Make calls until there is None."""
    while (task := tasks.get()) is not None:
        task.run()
        del task  # Its result is not ours to keep.


def _end(tasks: Tasks, thread: threading.Thread) -> None:
    """Finish the call that is under way, drop those behind it, and end the thread."""
    while not tasks.empty():
        if (task := tasks.get()) is not None:
            task.drop()
    tasks.put(None)
    thread.join()


class InProcessExecutor:
    """Runs steps one after the other on a single thread, so that Python plans step n + 1 while kernels run step n.

    Kernels release the GIL. Nothing but this thread touches the worker once steps are submitted.
    """

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker
        self._tasks: Tasks = SimpleQueue()
        # A daemon, so that a program may end without a call of `close`: the finalizer ends it then, between two steps.
        thread = threading.Thread(target=_serve, args=(self._tasks,), name="samovar-worker", daemon=True)
        thread.start()
        self._finish = weakref.finalize(self, _end, self._tasks, thread)

    @property
    def num_blocks(self) -> int:
        """Cache blocks the worker holds."""
        return self._worker.num_blocks

    @property
    def cache_specs(self) -> list[CacheSpec]:
        """What each layer caches."""
        return self._worker.cache_specs

    def submit(self, step: ScheduledStep) -> Task[StepResult]:
        """Queue one step behind those already submitted."""
        return self._submit(Task(self._worker.execute, step))

    def _submit(self, task: Task[T]) -> Task[T]:
        self._tasks.put(task)
        return task

    def prepare(self) -> bool:
        """Nothing: a step on the CPU is as fast the first time."""
        return False

    def call(self, name: str, *arguments: Any, sign: Callable[[], None] | None = None) -> Any:
        """See `Executor`."""
        assert name in WORKER_CALLS, name
        answer = self._submit(Task(getattr(self._worker, name), *arguments))
        while not answer.is_over(SIGN_SECONDS):
            if sign is not None:
                sign()
        return answer.result()

    def close(self) -> None:
        """Finish the step that is running, drop those behind it, and end the thread."""
        self._finish()
