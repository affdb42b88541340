"""Sequence: one running token stream of a request. Owned and changed by the scheduler only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from samovar.core.request import Request


class SequenceStatus(Enum):
    """Where a sequence stands. WAITING covers new, deferred (n > 1 siblings) and preempted ones."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(str, Enum):
    """Why a sequence ended; the values are what the APIs print."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids, blocks and progress of one sequence.

    `token_ids` is prompt then output. `num_computed_tokens` counts tokens whose K/V is written or will be written by
    the steps already launched. `num_in_flight` counts tokens that a launched step will sample and whose ids are not
    known yet (0 or 1 without speculation); they are not in `token_ids`.
    """

    request: Request
    index: int
    token_ids: list[int]
    num_prompt_tokens: int
    status: SequenceStatus = SequenceStatus.WAITING
    slot: int | None = None
    """Row of the worker's persistent buffers while running."""
    block_table: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_in_flight: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens taken from the prefix cache at first admission (the figure that usage reports)."""
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens whose ids are known."""
        return len(self.token_ids)

    @property
    def key(self) -> tuple[str, int]:
        return (self.request.request_id, self.index)
