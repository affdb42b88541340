"""The gated delta rule in Triton.

Sequences with one token: every program reads its part of a state once and writes it once, which is what takes the time.

Others: `prepare_kernel` looks at each chunk by itself, all at once. It solves for T = (1 + A)^-1, A being what the tokens of
a chunk have in common, and leaves what depends on q, k and the gates only. `pass_kernel` then goes through the chunks of
a sequence with the state in registers: u = T (v - c k S), y = e q S + P u, S = end S + k^T (d u). Norms of q and k are factors
of rows of products, so both are multiplied as they come. Every exponent is a sum of logarithms that are not positive.

T is put together out of inverses of blocks on the diagonal, of 2 rows, then 4, up to all: with D what there is and B what
stands between neighbouring blocks, D - D B D is the next one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from samovar.kernels.gated_delta_rule import CHUNK, NORM_EPS, gated_delta_rule
from samovar.kernels.gated_delta_rule.tiles import PREPARE_WARPS, STEP, PassTile, StepTile, pass_tile
from samovar.kernels.op import Target
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import INTERPRETED, await_previous, start_next
from samovar.kernels.ragged import most_tiles
from samovar.kernels.ragged.triton import locate
from samovar.kernels.triton_launch import SHARED_BYTES, cdiv, launch, next_power_of_2

WITHOUT_DOT = {"sm_70", "sm_72"}
"""Architectures whose matrix instructions Triton does not use."""

_shared = SHARED_BYTES[90]


def accepts(target: Target) -> str | None:
    """Chips with matrix instructions; takes note of their shared memory."""
    global _shared
    if target.architecture in WITHOUT_DOT:
        return "needs matrix instructions, of sm_75 or later"
    # An unknown chip is taken for one with as little as any has.
    _shared = SHARED_BYTES.get(int(target.architecture.removeprefix("sm_") or 0), min(SHARED_BYTES.values()))
    return None


@triton.jit
def _decay(a: tl.tensor, rate: tl.tensor, dt_bias: tl.tensor) -> tl.tensor:
    """The logarithm of what is kept: rate * softplus(a + dt_bias), in float32."""
    x = a.to(tl.float32) + dt_bias
    return rate * (tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x))))


@triton.jit
def _product(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    """a b in float32; Triton's interpreter multiplies matrices of bfloat16 as if they were integers."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=["beta_scale"])
def step_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, a: tl.tensor, b: tl.tensor, rates: tl.tensor, dt_bias: tl.tensor, state: tl.tensor,
    first_rows: tl.tensor, state_rows: tl.tensor, out: tl.tensor,
    q_stride: tl.tensor, k_stride: tl.tensor, v_stride: tl.tensor, a_stride: tl.tensor, b_stride: tl.tensor,
    beta_scale: tl.tensor, eps: tl.tensor,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, ALL_SINGLE: tl.constexpr,
    K: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """One token of one sequence, COLUMNS of a head's values. Sequences with more tokens are not meant."""
    sequence, head = tl.program_id(2), tl.program_id(1)
    if ALL_SINGLE:
        token, width = sequence.to(tl.int64), DV
    else:
        first = tl.load(first_rows + sequence)
        token = first.to(tl.int64)
        width = tl.where(tl.load(first_rows + sequence + 1) - first == 1, DV, 0)
    feature, column = tl.arange(0, K), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    in_feature, in_column = feature < DK, column < width
    inside = in_column[:, None] & in_feature[None, :]
    place = (tl.load(state_rows + sequence).to(tl.int64) * HEADS + head) * (DV * DK)
    at = state + place + column[:, None] * DK + feature[None, :]
    # The kernel ahead does not write states: they are fetched while it ends.
    memory = tl.load(at, inside, 0.0).to(tl.float32)
    rate, bias = tl.load(rates + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
    await_previous(OVERLAP)
    key = tl.load(k + token * k_stride + head // SHARE * DK + feature, in_feature, 0.0).to(tl.float32)
    query = tl.load(q + token * q_stride + head // SHARE * DK + feature, in_feature, 0.0).to(tl.float32)
    value = tl.load(v + token * v_stride + head * DV + column, in_column, 0.0).to(tl.float32)
    kept = tl.exp(_decay(tl.load(a + token * a_stride + head), rate, bias))
    beta = beta_scale * tl.sigmoid(tl.load(b + token * b_stride + head).to(tl.float32))
    start_next(OVERLAP)
    key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
    query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * (1.0 / DK**0.5)
    memory *= kept
    added = beta * (value - tl.sum(memory * key[None, :], 1))
    memory += added[:, None] * key[None, :]
    tl.store(at, memory.to(state.dtype.element_ty), inside)
    y = tl.sum(memory * query[None, :], 1)
    tl.store(out + (token * HEADS + head) * DV + column, y.to(out.dtype.element_ty), in_column)


@triton.jit
def _inverse(common: tl.tensor, SIZE: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """(1 + common)^-1 for a strictly lower triangular matrix [SIZE, SIZE]; SIZE is 64."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    result = (row == column).to(tl.float32) - tl.where(row // 2 == column // 2, common, 0.0)
    tl.static_assert(SIZE == 64)
    for level in range(1, 6):
        joins = (row >> (level + 1) == column >> (level + 1)) & (row >> level != column >> level)
        left = tl.dot(result, tl.where(joins, common, 0.0), input_precision=PRECISION)
        result -= tl.dot(left, result, input_precision=PRECISION)
    return result


@triton.jit(do_not_specialize=["sequences", "beta_scale"])
def prepare_kernel(
    q: tl.tensor, k: tl.tensor, a: tl.tensor, b: tl.tensor, rates: tl.tensor, dt_bias: tl.tensor, first_rows: tl.tensor,
    solved: tl.tensor, scores: tl.tensor, factors: tl.tensor,
    sequences: tl.tensor, q_stride: tl.tensor, k_stride: tl.tensor, a_stride: tl.tensor, b_stride: tl.tensor,
    beta_scale: tl.tensor, eps: tl.tensor,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr, PRECISION: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Of one chunk and head: solved (T beta), scores (P) [SIZE, SIZE], and factors [4, SIZE] of rows: c, e, d and sums of
    logarithms of decays."""
    await_previous(OVERLAP)
    start_next(OVERLAP)
    number, head = tl.program_id(0), tl.program_id(1)
    _, first, rows, start = locate(first_rows, sequences, number, SIZE)
    if (start < rows) & (rows > 1):
        index, feature = tl.arange(0, SIZE), tl.arange(0, K)
        inside = start + index < rows
        token = (first + start + index).to(tl.int64)
        mask = inside[:, None] & (feature < DK)[None, :]
        at = head // SHARE * DK + feature[None, :]
        key = tl.load(k + token[:, None] * k_stride + at, mask, 0.0)
        query = tl.load(q + token[:, None] * q_stride + at, mask, 0.0)
        rate, bias = tl.load(rates + head).to(tl.float32), tl.load(dt_bias + head).to(tl.float32)
        log_kept = _decay(tl.load(a + token * a_stride + head, inside, 0.0), rate, bias)
        beta = beta_scale * tl.sigmoid(tl.load(b + token * b_stride + head, inside, 0.0).to(tl.float32))
        wide_key, wide_query = key.to(tl.float32), query.to(tl.float32)
        key_scale = tl.rsqrt(tl.sum(wide_key * wide_key, 1) + eps)
        query_scale = tl.rsqrt(tl.sum(wide_query * wide_query, 1) + eps) * (1.0 / DK**0.5)
        total = tl.cumsum(tl.where(inside, log_kept, 0.0), 0)
        end = tl.sum(tl.where(inside, log_kept, 0.0), 0)
        earlier = index[:, None] > index[None, :]
        both = tl.exp(tl.where(earlier, total[:, None] - total[None, :], 0.0)) * key_scale[None, :]
        common = tl.where(earlier, _product(key, tl.trans(key)) * both * (beta * key_scale)[:, None], 0.0)
        to = (number.to(tl.int64) * HEADS + head) * (SIZE * SIZE) + index[:, None] * SIZE + index[None, :]
        tl.store(solved + to, (_inverse(common, SIZE, PRECISION) * beta[None, :]).to(solved.dtype.element_ty))
        score = _product(query, tl.trans(key)) * both * query_scale[:, None]
        score = tl.where(index[:, None] >= index[None, :], score, 0.0)
        tl.store(scores + to, score.to(scores.dtype.element_ty))
        own = factors + (number.to(tl.int64) * HEADS + head) * (4 * SIZE) + index
        ahead = tl.exp(total)
        tl.store(own, ahead * key_scale)
        tl.store(own + SIZE, ahead * query_scale)
        tl.store(own + 2 * SIZE, tl.exp(tl.minimum(end - total, 0.0)) * key_scale)
        tl.store(own + 3 * SIZE, total)


@triton.jit
def pass_kernel(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, solved: tl.tensor, scores: tl.tensor, factors: tl.tensor, state: tl.tensor,
    first_rows: tl.tensor, state_rows: tl.tensor, out: tl.tensor,
    q_stride: tl.tensor, k_stride: tl.tensor, v_stride: tl.tensor,
    HEADS: tl.constexpr, SHARE: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    K: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr, STAGES: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """One sequence, COLUMNS of a head's values, chunk by chunk."""
    sequence, head = tl.program_id(2), tl.program_id(1)
    first = tl.load(first_rows + sequence)
    rows = tl.load(first_rows + sequence + 1) - first
    feature, column = tl.arange(0, K), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # A sequence with one token has been seen to by `step_kernel`.
    in_feature, in_column, index = feature < DK, column < tl.where(rows > 1, DV, 0), tl.arange(0, SIZE)
    inside = in_feature[:, None] & in_column[None, :]
    place = (tl.load(state_rows + sequence).to(tl.int64) * HEADS + head) * (DV * DK)
    at = state + place + column[None, :] * DK + feature[:, None]
    memory = tl.load(at, inside, 0.0).to(tl.float32)
    await_previous(OVERLAP)
    start_next(OVERLAP)
    chunk = ((first // SIZE + sequence).to(tl.int64)) * HEADS + head
    begin = first.to(tl.int64)
    q += begin * q_stride + head // SHARE * DK
    k += begin * k_stride + head // SHARE * DK
    v += begin * v_stride + head * DV
    out += (begin * HEADS + head) * DV
    square = index[:, None] * SIZE + index[None, :]
    for start in tl.range(0, tl.where(rows > 1, rows, 0), SIZE, num_stages=STAGES):
        row = start + index
        mask = (row < rows)[:, None]
        keys = tl.load(k + row.to(tl.int64)[:, None] * k_stride + feature[None, :], mask & in_feature[None, :], 0.0)
        queries = tl.load(q + row.to(tl.int64)[:, None] * q_stride + feature[None, :], mask & in_feature[None, :], 0.0)
        values = tl.load(v + row.to(tl.int64)[:, None] * v_stride + column[None, :], mask & in_column[None, :], 0.0)
        inverse = tl.load(solved + chunk * (SIZE * SIZE) + square)
        score = tl.load(scores + chunk * (SIZE * SIZE) + square)
        own = factors + chunk * (4 * SIZE)
        for_keys, for_queries = tl.load(own + index), tl.load(own + SIZE + index)
        for_added, end = tl.load(own + 2 * SIZE + index), tl.load(own + 4 * SIZE - 1)
        narrow = memory.to(keys.dtype)
        missing = values.to(tl.float32) - for_keys[:, None] * _product(keys, narrow)
        added = _product(inverse, missing.to(keys.dtype))
        y = for_queries[:, None] * _product(queries, narrow) + _product(score, added.to(keys.dtype))
        memory = memory * tl.exp(end) + _product(tl.trans(keys), (added * for_added[:, None]).to(keys.dtype))
        to = out + row.to(tl.int64)[:, None] * (HEADS * DV) + column[None, :]
        tl.store(to, y.to(out.dtype.element_ty), mask & in_column[None, :])
        chunk += HEADS
    tl.store(at, memory.to(state.dtype.element_ty), inside)


@gated_delta_rule.impl("triton", devices=("cuda",), accepts=accepts)
def gated_delta_rule_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    rates: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    first_rows: torch.Tensor,
    state_rows: torch.Tensor,
    new_tokens: Sequence[int],
    all_single: bool,
    beta_scale: float = 1.0,
) -> torch.Tensor:
    """One kernel for sequences with one token, two for others."""
    q, k, v = (each if each.stride()[1:] == (each.shape[2], 1) else each.contiguous() for each in (q, k, v))
    a, b = (each if each.stride(1) == 1 else each.contiguous() for each in (a, b))
    out = v.new_empty(v.shape)
    gates = (a, b, rates, dt_bias)
    rows = (first_rows, state_rows)
    if all_single or 1 in new_tokens:
        step(STEP, q, k, v, gates, state, rows, out, all_single, beta_scale)
    if not all_single and max(new_tokens) > 1:
        chunks(pass_tile(_shared, q.itemsize), q, k, v, gates, state, rows, out, beta_scale)
    return out


Gates = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
Rows = tuple[torch.Tensor, torch.Tensor]


def step(
    tile: StepTile,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: Gates,
    state: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
    all_single: bool,
    beta_scale: float,
) -> None:
    """Sequences with one token, with a given tile."""
    heads, dv, dk = v.shape[1], v.shape[2], k.shape[2]
    strides = (q.stride(0), k.stride(0), v.stride(0), gates[0].stride(0), gates[1].stride(0))
    launch(
        step_kernel, (cdiv(dv, tile.columns), heads, len(rows[1])),
        q, k, v, *gates, state, *rows, out, *strides, beta_scale, NORM_EPS,
        HEADS=heads, SHARE=heads // k.shape[1], DK=dk, DV=dv, ALL_SINGLE=all_single,
        K=next_power_of_2(dk), COLUMNS=tile.columns, num_warps=tile.warps, **launch_options(),
    )  # fmt: skip


def chunks(
    tile: PassTile,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gates: Gates,
    state: torch.Tensor,
    rows: Rows,
    out: torch.Tensor,
    beta_scale: float,
) -> None:
    """Sequences with more tokens, with a given tile."""
    (tokens, heads, dv), dk, count = v.shape, k.shape[2], len(rows[1])
    prepared = prepare_chunks(q, k, heads, gates, rows, most_tiles(tokens, count, CHUNK), beta_scale)
    launch(
        pass_kernel, (cdiv(dv, tile.columns), heads, count),
        q, k, v, *prepared, state, *rows, out, q.stride(0), k.stride(0), v.stride(0),
        HEADS=heads, SHARE=heads // k.shape[1], DK=dk, DV=dv, K=max(16, next_power_of_2(dk)), COLUMNS=tile.columns,
        SIZE=CHUNK, STAGES=tile.stages, num_warps=tile.warps, **launch_options(),
    )  # fmt: skip


def prepare_chunks(
    q: torch.Tensor, k: torch.Tensor, heads: int, gates: Gates, rows: Rows, number: int, beta_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What `prepare_kernel` makes of `number` chunks."""
    solved, scores = (q.new_empty(number, heads, CHUNK, CHUNK) for _ in range(2))
    factors = q.new_empty(number, heads, 4, CHUNK, dtype=torch.float32)
    dk = k.shape[2]
    launch(
        prepare_kernel, (number, heads),
        q, k, *gates, rows[0], solved, scores, factors,
        len(rows[1]), q.stride(0), k.stride(0), gates[0].stride(0), gates[1].stride(0), beta_scale, NORM_EPS,
        HEADS=heads, SHARE=heads // k.shape[1], DK=dk, K=max(16, next_power_of_2(dk)), SIZE=CHUNK,
        PRECISION="ieee" if q.itemsize == 4 else "tf32", num_warps=PREPARE_WARPS, **launch_options(),
    )  # fmt: skip
    return solved, scores, factors
