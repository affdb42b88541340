"""ForwardBatch: one step as tensors. Built by the worker, read by layers."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from samovar.attention.base import AttentionPlan


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
