"""ForwardBatch: one step as tensors. Built by the worker, read by layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from samovar.attention.base import AttentionPlan, Spans


@dataclass(frozen=True, slots=True, eq=False)
class SequenceRows:
    """Whose rows are whose, for layers with a state: sequence i has rows `first_rows[i]` to `first_rows[i + 1]` of the
    step, and row `state_rows[i]` of every state tensor, which holds what it begins with and receives what it ends with.

    `first_rows` is int32 [sequences + 1], `state_rows` int32 [sequences], both on the device; `new_tokens` says on the
    host how many rows each has. With `all_single` each has one, and `first_rows` counts up. Rows that only fill a graph
    belong to sequences that share the spare row of the state, which is never read for anybody.
    """

    first_rows: torch.Tensor
    state_rows: torch.Tensor
    new_tokens: Sequence[int]
    all_single: bool


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """The rows of one step: the new tokens of every sequence, one sequence after the other.

    `token_ids`, `positions`, `slot_mapping` are int64 [num_tokens]; `slot_mapping` is where each token's K/V goes
    (block id * block_size + offset). `plans` come from `AttentionRoute.plan`, one per attention group.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    plans: tuple[AttentionPlan, ...]
    rope_tables: dict[object, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """Filled by the first rope layer of each parameter set; the other layers of the step read it."""
    sequences: SequenceRows | None = None
    """For models with recurrent layers."""


def sequence_rows(spans: Spans) -> SequenceRows | None:
    """The sequences of a step as attention is told of them on a GPU: states are in the same rows as block tables, the
    spare one behind those of all slots included."""
    given = spans.tensors
    if given is None:
        return None
    return SequenceRows(given.first_rows, given.table_rows, spans.new_tokens, all(new == 1 for new in spans.new_tokens))
