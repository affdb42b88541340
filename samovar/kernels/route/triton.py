"""The router in Triton: one program, one warp or a few, for each token; nothing waits for the host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.route import Scoring, route
from samovar.kernels.triton_launch import launch, next_power_of_2


@triton.jit
def _first_largest(values: tl.tensor, places: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The largest of `values` [G, N], and the least of `places` that has it."""
    best = tl.max(tl.max(values, 1), 0)
    return best, tl.min(tl.min(tl.where(values == best, places, 1 << 30), 1), 0)


@triton.jit
def _keep_groups(
    choice: tl.tensor,
    group: tl.tensor,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
) -> tl.tensor:
    """`choice` [G, N] with -inf outside of the best groups; `group` [G] are their numbers."""
    left, value = choice, tl.zeros_like(tl.max(choice, 1))
    places = tl.arange(0, choice.shape[1])[None, :]
    for _ in tl.static_range(GROUP_BEST):
        best = tl.max(left, 1)
        value += best
        first = tl.min(tl.where(left == best[:, None], places, 1 << 30), 1)
        left = tl.where(places == first[:, None], float("-inf"), left)
    value = tl.where(group < GROUPS, value, float("-inf"))
    is_kept = group < 0
    for _ in tl.static_range(TOP_GROUPS):
        best = tl.max(value, 0)
        first = tl.min(tl.where(value == best, group, 1 << 30), 0)
        is_kept = is_kept | (group == first)
        value = tl.where(group == first, float("-inf"), value)
    return tl.where(is_kept[:, None], choice, float("-inf"))


@triton.jit
def route_kernel(
    logits: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    scale: tl.tensor,
    least: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    SOFTMAX: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    G: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """weights, ids [tokens, TOP_K] of one token. Scores stand as [G, N]: groups, and experts of a group, both padded."""
    token = tl.program_id(0).to(tl.int64)
    SIZE: tl.constexpr = EXPERTS // GROUPS
    group, member = tl.arange(0, G), tl.arange(0, N)
    place = group[:, None] * SIZE + member[None, :]
    inside = (group < GROUPS)[:, None] & (member < SIZE)[None, :]
    await_previous(OVERLAP)
    start_next(OVERLAP)
    x = tl.load(logits + token * EXPERTS + place, mask=inside, other=float("-inf")).to(tl.float32)
    if SOFTMAX:
        powers = tl.exp(x - tl.max(tl.max(x, 1), 0))
        scores = powers / tl.sum(tl.sum(powers, 1), 0)
    else:
        scores = tl.sigmoid(x)
    choice = scores
    if bias is not None:
        choice += tl.load(bias + place, mask=inside, other=0.0).to(tl.float32)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        choice = _keep_groups(choice, group, GROUPS, TOP_GROUPS, GROUP_BEST)
    # Places beyond the last expert, in order, take part in nothing: a choice that is left is larger than -inf.
    unique = tl.where(inside, place, (1 << 20) + group[:, None] * N + member[None, :])
    slots = tl.arange(0, K)
    chosen = tl.zeros((K,), tl.int32)
    taken = tl.zeros((K,), tl.float32)
    for slot in tl.static_range(TOP_K):
        _, first = _first_largest(choice, unique)
        is_first = unique == first
        score = tl.sum(tl.sum(tl.where(is_first, scores, 0.0), 1), 0)
        chosen = tl.where(slots == slot, first, chosen)
        taken = tl.where(slots == slot, score, taken)
        choice = tl.where(is_first, float("-inf"), choice)
    if RENORMALIZE:
        taken /= tl.maximum(tl.sum(taken, 0), least)
    tl.store(weights + token * TOP_K + slots, taken * scale, mask=slots < TOP_K)
    tl.store(ids + token * TOP_K + slots, chosen, mask=slots < TOP_K)


@route.impl("triton", devices=("cuda",))
def route_triton(
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
    """Scores live in registers; the best is taken `top_k` times."""
    tokens, experts = logits.shape
    weights = logits.new_empty(tokens, top_k, dtype=torch.float32)
    ids = logits.new_empty(tokens, top_k, dtype=torch.int32)
    members = next_power_of_2(experts // groups)
    options = {"EXPERTS": experts, "TOP_K": top_k, "SOFTMAX": scoring == "softmax", "RENORMALIZE": renormalize}
    options |= {"GROUPS": groups, "TOP_GROUPS": top_groups, "GROUP_BEST": group_best}
    options |= {"G": next_power_of_2(groups), "N": members, "K": next_power_of_2(top_k)}
    options |= {"num_warps": 1 if experts <= 128 else 2}
    launch(
        route_kernel, (tokens,), logits.contiguous(), bias, weights, ids, scale, least, **options, **launch_options()
    )
    return weights, ids
