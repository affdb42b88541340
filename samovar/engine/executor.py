"""Executor: runs scheduled steps on the workers. The engine loop submits step n + 1 before it reads result n."""

from __future__ import annotations

from typing import Protocol

from samovar.core.cache_spec import CacheSpec
from samovar.core.step import PendingStep, ScheduledStep


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

    def close(self) -> None: ...
