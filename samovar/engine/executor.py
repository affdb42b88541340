"""Executor: runs scheduled steps on the workers. The engine loop submits step n + 1 before it reads result n."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from samovar.core.cache_spec import CacheSpec
from samovar.core.step import PendingStep, ScheduledStep

WORKER_CALLS = frozenset(
    {
        "release_cache",
        "restore_cache",
        "release_weights",
        "restore_weights",
        "holds_weights",
        "memory_reading",
        "start_profile",
        "stop_profile",
        "watch_logits",
    }
)
"""Methods of a worker, besides its steps."""
SHOWS_PROGRESS = frozenset({"release_weights", "restore_weights"})
"""Those that take a listener for progress as their last argument."""


class Executor(Protocol):
    """The same three verbs whether the worker is in this process, in others, or on other machines.

    Steps run strictly in the order they were submitted. `PendingStep.result` gives the step's result, or raises
    if the step as a whole failed (rows that fail alone are reported in `StepResult.failed`).
    """

    @property
    def num_blocks(self) -> int: ...

    @property
    def cache_specs(self) -> list[CacheSpec]: ...

    def submit(self, step: ScheduledStep) -> PendingStep: ...

    def prepare(self) -> bool:
        """Use a moment without work to make later steps faster; False once there is nothing left to prepare."""
        ...

    def call(self, name: str, *arguments: Any, sign: Callable[[], None] | None = None) -> Any:
        """Have the worker run one of `WORKER_CALLS` behind the steps submitted so far, wait, and return its answer.

        `sign` is called on this thread now and then while it lasts. Raises what the worker raised.
        """
        ...

    def close(self) -> None: ...
