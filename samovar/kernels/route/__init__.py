"""Routers of mixtures of experts: which experts compute a token, and how much each of them counts.

One op for the variants in use: softmax over all experts (Qwen, OLMoE) and over the chosen ones (Mixtral, gpt-oss: the
same numbers, renormalized), sigmoid with a bias that only decides who is chosen (DeepSeek V3, Liu et al. 2024, its
load balancing without a loss), and groups of experts of which a token may use some (DeepSeek V2 and V3).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from samovar.kernels.op import op

Scoring = Literal["softmax", "sigmoid"]


@op(prefer=("triton",), plain_is_best=("cpu",))
def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    top_k: int,
    scoring: Scoring,
    renormalize: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    group_best: int = 2,
    least: float = 1e-20,
) -> tuple[torch.Tensor, torch.Tensor]:
    """logits [tokens, experts] -> (weights float32 [tokens, top_k], expert ids int32 [tokens, top_k]), best first.

    Scores are softmax or sigmoid of the logits. Experts are chosen by score plus `bias` [experts], the first of equals;
    weights are the scores of the chosen, with `renormalize` divided by their sum (or `least`, if that is more), times
    `scale`. With `groups` > 1, experts stand in groups of equal size, and only those in the `top_groups` best groups may
    be chosen, a group being as good as its `group_best` best experts together.
    """
    tokens, experts = logits.shape
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = torch.softmax(exact, -1) if scoring == "softmax" else torch.sigmoid(exact)
    choice = scores if bias is None else scores + bias.to(scores.dtype)
    if groups > 1:
        by_group = choice.view(tokens, groups, experts // groups)
        value = by_group.sort(-1, descending=True)[0][..., :group_best].sum(-1)
        kept = value.sort(dim=-1, descending=True, stable=True)[1][:, :top_groups]
        out = torch.ones(tokens, groups, dtype=torch.bool, device=logits.device).scatter_(1, kept, False)
        choice = by_group.masked_fill(out[..., None], -torch.inf).view(tokens, experts)
    ids = choice.sort(dim=-1, descending=True, stable=True)[1][:, :top_k]
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=least)
    return weights * scale, ids.to(torch.int32)


@route.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    yield 2 * torch.randn(5, 16), None, 4, "softmax", True
    yield 2 * torch.randn(1, 60), None, 4, "softmax"
    yield 2 * torch.randn(3, 64), 0.2 * torch.rand(64), 6, "sigmoid", True, 2.5, 8, 4
    yield 2 * torch.randn(3, 24), torch.rand(24), 3, "sigmoid", True, 1.0, 3, 2, 1
    yield 2 * torch.randn(2, 12), 0.1 * torch.rand(12), 1, "softmax", True
    yield torch.randn(0, 16), None, 2, "softmax"


for _dtype in (torch.float32, torch.bfloat16, torch.float16):
    route.tolerance[_dtype] = (2e-6, 2e-6)  # computed in float32 from whatever logits are
