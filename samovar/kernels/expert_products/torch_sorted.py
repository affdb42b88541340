"""Experts on a CPU: pairs of token and expert sorted by expert, so that every expert multiplies its tokens at once."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from samovar.kernels.expert_products import Gate, activated, expert_products


@expert_products.impl("torch_sorted", devices=("cpu",))
def expert_products_sorted(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    limit: float = 0.0,
    first: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """One product of each kind for every expert that has tokens."""
    (tokens, hidden), k = x.shape, ids.shape[1]
    results = x.new_zeros(tokens * k, hidden)
    for expert, pairs in pairs_by_expert(ids, first, len(gate_up)):
        h = linear(x[pairs // k], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        h = activated(h, activation, interleaved, limit)
        results[pairs] = linear(h, down[expert], None if down_bias is None else down_bias[expert])
    return weighted_sum(results, weights, residual)


def pairs_by_expert(ids: torch.Tensor, first: int, count: int) -> list[tuple[int, torch.Tensor]]:
    """(expert counted from `first`, its pairs token * k + slot, ascending) for each of `count` experts with tokens."""
    flat = ids.flatten().long() - first
    order = flat.argsort(stable=True)
    found, begin = [], 0
    for expert, end in zip(*(part.tolist() for part in _ends(flat[order])), strict=True):
        if 0 <= expert < count:
            found.append((expert, order[begin:end]))
        begin = end
    return found


def _ends(ordered: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    experts, counts = torch.unique_consecutive(ordered, return_counts=True)
    return experts, counts.cumsum(0)


def weighted_sum(results: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
    """results [tokens * k, hidden], weights [tokens, k] -> [tokens, hidden], summed in float32 in the order of k, then
    `residual` [tokens, hidden]."""
    tokens, k = weights.shape
    exact = torch.promote_types(results.dtype, torch.float32)
    by_token, total = (
        results.view(tokens, k, results.shape[1]),
        results.new_zeros(tokens, results.shape[1], dtype=exact),
    )
    for slot in range(k):
        total += weights[:, slot, None].to(exact) * by_token[:, slot].to(exact)
    return (total if residual is None else total + residual).to(results.dtype)
