"""What every kernel for experts needs: pairs in blocks of one expert each, gates and biases, and the sum over a token's pairs.

A pair is token * k + slot: one token at one of its experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.expert_products import CLAMPED_ALPHA
from samovar.kernels.expert_products.tiles import most_blocks
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2

ALPHA = tl.constexpr(CLAMPED_ALPHA)

FEW_AT_ONCE, MANY_AT_ONCE = 1024, 4096
"""Pairs that the kernel that sorts looks at together, for the smallest blocks and for larger ones."""


@triton.jit
def gate_value(gate: tl.tensor, up: tl.tensor, limit: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """See `expert_products.activated`; all in float32. Without a gate there is `gate` alone, and it is what stands there."""
    if KIND == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate * tl.sigmoid(gate * ALPHA) * (up + 1.0)
    elif KIND == "silu":
        return gate * tl.sigmoid(gate) * up
    elif KIND == "relu2":
        gate = tl.maximum(gate, 0.0)
        return gate * gate
    else:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up


@triton.jit
def bias_of(bias: tl.tensor, expert: tl.tensor, N: tl.constexpr, rows: tl.tensor) -> tl.tensor:
    """Entries `rows` of an expert's bias, float32; rows beyond the end get one that nobody uses."""
    return tl.load(bias + expert * N + tl.minimum(rows, N - 1)).to(tl.float32)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def sort_kernel(
    ids: tl.tensor,
    order: tl.tensor,
    owners: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BM: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """order [blocks, BM]: the pairs of each expert, ascending, in blocks that begin anew with each expert, -1 behind the
    last; owners [blocks]: the expert of each block, -1 for none. One program per expert, which counts all for itself.

    BINS is a power of two above EXPERTS: the bins beyond count what is not here.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    within = tl.arange(0, SIZE)
    await_previous(OVERLAP)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, pairs, SIZE):
        at = begin + within
        found = tl.load(ids + at, mask=at < pairs, other=-1) - first
        found = tl.where((at < pairs) & (found >= 0) & (found < EXPERTS), found, EXPERTS)
        counts += tl.histogram(found, BINS)
    needed = tl.where(bins < EXPERTS, (counts + (BM - 1)) // BM, 0)
    start = tl.sum(tl.where(bins < expert, needed, 0), 0)
    own = tl.sum(tl.where(bins == expert, needed, 0), 0)
    for block in range(start, start + own):
        tl.store(owners + block, expert)
    if expert == EXPERTS - 1:
        for begin in range(start + own, blocks, BINS):
            tl.store(owners + begin + bins, tl.full((BINS,), -1, tl.int32), mask=begin + bins < blocks)
    place = start * BM
    for begin in range(0, pairs, SIZE):
        at = begin + within
        is_own = (at < pairs) & (tl.load(ids + at, mask=at < pairs, other=-1) - first == expert)
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + place + rank - 1, at, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    rest = place + tl.arange(0, BM)
    tl.store(order + rest, tl.full((BM,), -1, tl.int32), mask=rest < (start + own) * BM)
    start_next(OVERLAP)


@triton.jit
def pairs_of(
    ids: tl.tensor, expert: tl.tensor, tokens: tl.tensor, TOP_K: tl.constexpr, BM: tl.constexpr, SLOTS: tl.constexpr
) -> tl.tensor:
    """[BM]: the pair at which each of the first BM tokens has `expert`; -1 for none."""
    token, slot = tl.arange(0, BM)[:, None], tl.arange(0, SLOTS)[None, :]
    pair = token * TOP_K + slot
    inside = (token < tokens) & (slot < TOP_K)
    found = tl.load(ids + pair, mask=inside, other=-1)
    return tl.max(tl.where(inside & (found == expert), pair, -1), 1)


@triton.jit
def sum_kernel(
    results: tl.tensor,
    ids: tl.tensor,
    routing: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [tokens, N] = the sum over a token's pairs, in order, of routing * results [pairs, N], and residual [tokens, N]
    if there is one: BN columns of a token."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    await_previous(OVERLAP)
    start_next(OVERLAP)
    total = tl.zeros((BN,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair) - first
        # What an expert elsewhere would have left here is not written.
        end = tl.where((expert >= 0) & (expert < EXPERTS), N, 0)
        share = tl.load(routing + pair).to(tl.float32)
        y = tl.load(results + pair.to(tl.int64) * N + columns, mask=columns < end, other=0.0)
        total += share * y.to(tl.float32)
    if residual is not None:
        total += tl.load(residual + token.to(tl.int64) * N + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * N + columns, total.to(out.dtype.element_ty), mask=columns < N)


class Grouping:
    """The pairs of one call: x [tokens, hidden], ids and routing weights [tokens, k] for `experts` experts from `first` on."""

    def __init__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: int,
        first: int,
        residual: torch.Tensor | None,
    ) -> None:
        self.x, self.ids, self.routing, self.first = x.contiguous(), ids.contiguous(), weights.contiguous(), first
        self.residual = None if residual is None else residual.contiguous()
        self.tokens, self.top_k = ids.shape
        self.experts, self.hidden = experts, x.shape[1]
        self.order: torch.Tensor | None = None
        self.owners: torch.Tensor | None = None
        self.blocks = experts

    def sort(self, size: int) -> None:
        """Put the pairs of each expert into blocks of `size`."""
        pairs = self.tokens * self.top_k
        self.blocks = most_blocks(pairs, self.experts, size)
        self.order = self.ids.new_empty(self.blocks * size)
        self.owners = self.ids.new_empty(self.blocks)
        options = {"EXPERTS": self.experts, "BINS": next_power_of_2(self.experts + 1), "BM": size}
        options |= {"SIZE": FEW_AT_ONCE if size <= 16 else MANY_AT_ONCE, "num_warps": 4 if size <= 16 else 8}
        tensors = (self.ids, self.order, self.owners)
        launch(sort_kernel, (self.experts,), *tensors, pairs, self.blocks, self.first, **options, **launch_options())

    def sum(self, results: torch.Tensor) -> torch.Tensor:
        """results [pairs, hidden] -> [tokens, hidden]."""
        out, columns = torch.empty_like(self.x), min(next_power_of_2(self.hidden), 2048)
        options = {"EXPERTS": self.experts, "TOP_K": self.top_k, "N": self.hidden, "BN": columns, "num_warps": 4}
        grid = (self.tokens, cdiv(self.hidden, columns))
        tensors = (results, self.ids, self.routing, self.residual, out)
        launch(sum_kernel, grid, *tensors, self.first, **options, **launch_options())
        return out
