"""One or two tokens: vectors times the weights of their experts on the CUDA cores, and the sum over experts inside the second
product."""

from __future__ import annotations

import triton
import triton.language as tl

from samovar.kernels.expert_products.grouping.triton import bias_of, gate_value
from samovar.kernels.overlap.triton import await_previous, start_next


@triton.jit
def _weights(start: tl.tensor, rows: tl.tensor, columns: tl.tensor, K: tl.constexpr, EVEN: tl.constexpr) -> tl.tensor:
    """[rows, columns] of a weight with K inputs. They are read once: nothing else should leave the caches for them."""
    at = start + rows[:, None] * K + columns[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=columns[None, :] < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector(x: tl.tensor, columns: tl.tensor, K: tl.constexpr, EVEN: tl.constexpr) -> tl.tensor:
    """[1, columns] float32 of a vector of length K."""
    if EVEN:
        return tl.load(x + columns[None, :]).to(tl.float32)
    else:
        return tl.load(x + columns[None, :], mask=columns[None, :] < K, other=0.0).to(tl.float32)


@triton.jit
def pair_gated_kernel(
    x: tl.tensor,
    ids: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    limit: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [pairs, N] = gated product of a pair's token with its expert's weight [2N, K], ungated [N, K]: BN results per
    program."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    pair = tl.program_id(1)
    EVEN: tl.constexpr = K % BK == 0
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    UP: tl.constexpr = 1 if INTERLEAVED else N
    PARTS: tl.constexpr = 1 if GATE == "relu2" else 2
    await_previous(OVERLAP)
    expert = tl.load(ids + pair) - first
    if (expert >= 0) & (expert < EXPERTS):
        start = weight + expert.to(tl.int64) * (PARTS * N * K)
        at = tl.minimum(rows, N - 1) * STEP
        here = x + (pair // TOP_K).to(tl.int64) * K
        total = tl.zeros((BN, BK), tl.float32)
        total_up = tl.zeros((BN, BK), tl.float32)
        for k in range(0, K, BK):
            columns = k + tl.arange(0, BK)
            tile = _weights(start, at, columns, K, EVEN)
            part = _vector(here, columns, K, EVEN)
            total += tile.to(tl.float32) * part
            if PARTS == 2:
                tile_up = _weights(start, at + UP, columns, K, EVEN)
                total_up += tile_up.to(tl.float32) * part
        gate, up = tl.sum(total, 1), tl.sum(total_up, 1)
        if bias is not None:
            gate += bias_of(bias, expert, PARTS * N, at)
            if PARTS == 2:
                up += bias_of(bias, expert, PARTS * N, at + UP)
        y = gate_value(gate, up, limit, GATE)
        tl.store(out + pair.to(tl.int64) * N + rows, y.to(out.dtype.element_ty), mask=rows < N)
    start_next(OVERLAP)


@triton.jit
def pair_down_kernel(
    h: tl.tensor,
    ids: tl.tensor,
    routing: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [tokens, N] = the sum over the pairs of a token of routing * (weight [N, K] of its expert times h [pairs, K])."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.minimum(rows, N - 1)
    token = tl.program_id(1)
    EVEN: tl.constexpr = K % BK == 0
    await_previous(OVERLAP)
    total = tl.zeros((BN, BK), tl.float32)
    biases = tl.zeros((BN,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair) - first
        is_here = (expert >= 0) & (expert < EXPERTS)
        expert = tl.where(is_here, expert, 0)
        share = tl.where(is_here, tl.load(routing + pair).to(tl.float32), 0.0)
        start = weight + expert.to(tl.int64) * (N * K)
        here = h + pair.to(tl.int64) * K
        for k in tl.static_range(0, K, BK):
            columns = k + tl.arange(0, BK)
            tile = _weights(start, at, columns, K, EVEN)
            # What an expert elsewhere would have left here is not written.
            part = tl.where(is_here, _vector(here, columns, K, EVEN), 0.0) * share
            total += tile.to(tl.float32) * part
        if bias is not None:
            biases += share * bias_of(bias, expert, N, at)
    start_next(OVERLAP)
    y = tl.sum(total, 1) + biases
    if residual is not None:
        y += tl.load(residual + token.to(tl.int64) * N + at).to(tl.float32)
    tl.store(out + token.to(tl.int64) * N + rows, y.to(out.dtype.element_ty), mask=rows < N)
