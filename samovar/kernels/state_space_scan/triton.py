"""The state-space scan in Triton: one program for some channels of a head of a sequence, with their state in registers.

Sequences with one token: a state is read once and written once, which is what takes the time. Others go through their
tokens in chunks, whose products run on the tensor cores: with L the decays between tokens, y = (c b^T * L) (dt x) + c S,
and S takes in the chunk by one more product. Nothing but x, b, c, dt and y touches memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from samovar.kernels.op import Target
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import INTERPRETED, await_previous, start_next
from samovar.kernels.state_space_scan import state_space_scan
from samovar.kernels.state_space_scan.tiles import SINGLE, ScanTile, scan_tile
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
def softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)) without loss for small results: below 0.03, log(1 + e) is four terms of its series."""
    e = tl.exp(-tl.abs(x))
    small = e * (1.0 - e * (0.5 - e * (0.3333333333 - e * 0.25)))
    return tl.maximum(x, 0.0) + tl.where(e < 0.03, small, tl.log(1.0 + e))


@triton.jit
def _product(a: tl.tensor, b: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """a b of numbers of KIND, summed in float32; Triton's interpreter multiplies matrices of bfloat16 as integers."""
    if INTERPRETED:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    else:
        return tl.dot(a.to(KIND), b.to(KIND), input_precision="ieee")


@triton.jit
def step_kernel(
    x: tl.tensor, dt: tl.tensor, b: tl.tensor, c: tl.tensor, rates: tl.tensor, dt_bias: tl.tensor, skip: tl.tensor,
    state: tl.tensor, state_rows: tl.tensor, out: tl.tensor,
    x_stride: tl.tensor, dt_stride: tl.tensor, b_stride: tl.tensor, c_stride: tl.tensor, low: tl.tensor, high: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, SHARE: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """One token of a sequence: out [COLUMNS] of one head, and its part of the state."""
    TILES: tl.constexpr = (DIM + COLUMNS - 1) // COLUMNS
    sequence = tl.program_id(1).to(tl.int64)
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    column, n = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    inside = (column < DIM)[:, None] & (n < N)[None, :]
    rate, bias, factor = tl.load(rates + head), tl.load(dt_bias + head), tl.load(skip + head)
    await_previous(OVERLAP)
    row = tl.load(state_rows + sequence).to(tl.int64)
    own = state + (row * HEADS + head) * (DIM * N) + column[:, None] * N + n[None, :]
    before = tl.load(own, inside, 0.0).to(tl.float32)
    start_next(OVERLAP)
    step = softplus(tl.load(dt + sequence * dt_stride + head).to(tl.float32) + bias)
    step = tl.minimum(tl.maximum(step, low), high)
    value = tl.load(x + sequence * x_stride + head * DIM + column, column < DIM, 0.0).to(tl.float32)
    shared = (head // SHARE) * N + n
    key = tl.load(b + sequence * b_stride + shared, n < N, 0.0).to(tl.float32)
    query = tl.load(c + sequence * c_stride + shared, n < N, 0.0).to(tl.float32)
    after = before * tl.exp(step * rate) + (value * step)[:, None] * key[None, :]
    tl.store(own, after.to(state.dtype.element_ty), inside)
    y = tl.sum(after * query[None, :], 1) + factor * value
    tl.store(out + (sequence * HEADS + head) * DIM + column, y.to(out.dtype.element_ty), column < DIM)


@triton.jit
def chunks_kernel(
    x: tl.tensor, dt: tl.tensor, b: tl.tensor, c: tl.tensor, rates: tl.tensor, dt_bias: tl.tensor, skip: tl.tensor,
    state: tl.tensor, first_rows: tl.tensor, state_rows: tl.tensor, out: tl.tensor,
    x_stride: tl.tensor, dt_stride: tl.tensor, b_stride: tl.tensor, c_stride: tl.tensor, low: tl.tensor, high: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, SHARE: tl.constexpr, N: tl.constexpr,
    COLUMNS: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """All tokens of a sequence, TOKENS at a time: out [tokens, COLUMNS] of one head, and its part of the state.

    A token that is not there has a step of 0, which leaves a state as it is.
    """
    TILES: tl.constexpr = (DIM + COLUMNS - 1) // COLUMNS
    KIND: tl.constexpr = x.dtype.element_ty
    sequence = tl.program_id(1)
    head, tile = tl.program_id(0) // TILES, tl.program_id(0) % TILES
    column, n, token = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH), tl.arange(0, TOKENS)
    inside = (column < DIM)[:, None] & (n < N)[None, :]
    rate, bias, factor = tl.load(rates + head), tl.load(dt_bias + head), tl.load(skip + head)
    is_seen = token[:, None] >= token[None, :]
    await_previous(OVERLAP)
    start_next(OVERLAP)
    first = tl.load(first_rows + sequence).to(tl.int64)
    count = (tl.load(first_rows + sequence + 1) - first).to(tl.int32)
    row = tl.load(state_rows + sequence).to(tl.int64)
    own = state + (row * HEADS + head) * (DIM * N) + column[:, None] * N + n[None, :]
    held = tl.load(own, inside, 0.0).to(tl.float32)
    shared = (head // SHARE) * N + n
    for start in range(0, count, TOKENS):
        is_there = start + token < count
        at = first + start + token
        step = softplus(tl.load(dt + at * dt_stride + head, is_there, 0.0).to(tl.float32) + bias)
        step = tl.where(is_there, tl.minimum(tl.maximum(step, low), high), 0.0)
        total = tl.cumsum(step * rate, 0)
        end = tl.sum(step * rate, 0)
        is_key = is_there[:, None] & (n < N)[None, :]
        keys = tl.load(b + at[:, None] * b_stride + shared[None, :], is_key, 0.0)
        queries = tl.load(c + at[:, None] * c_stride + shared[None, :], is_key, 0.0)
        is_value = is_there[:, None] & (column < DIM)[None, :]
        given = tl.load(x + at[:, None] * x_stride + head * DIM + column[None, :], is_value, 0.0).to(tl.float32)
        values = given * step[:, None]
        decay = tl.where(is_seen, tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0)), 0.0)
        scores = _product(queries, tl.trans(keys), KIND) * decay
        y = _product(queries, tl.trans(held), KIND) * tl.exp(total)[:, None]
        y += _product(scores, values, KIND) + given * factor
        place = out + at[:, None] * (HEADS * DIM) + head * DIM + column[None, :]
        tl.store(place, y.to(out.dtype.element_ty), is_value)
        kept = values * tl.exp(end - total)[:, None]
        held = held * tl.exp(end) + _product(tl.trans(kept), keys, KIND)
    tl.store(own, held.to(state.dtype.element_ty), inside)


@state_space_scan.impl("triton", devices=("cuda",), accepts=accepts)
def state_space_scan_triton(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rates: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    first_rows: torch.Tensor,
    state_rows: torch.Tensor,
    new_tokens: Sequence[int],
    all_single: bool,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """One kernel; rows of x, b, c and dt may lie apart."""
    heads, dim = x.shape[1:]
    size = SINGLE if all_single else scan_tile(len(state_rows) * heads, dim, b.shape[2], x.element_size(), _shared)
    operands = (x, dt, b, c, rates, dt_bias, skip, state)
    return scan_in(size, operands, first_rows, state_rows, all_single, dt_limit)


def scan_in(
    tile: ScanTile,
    operands: tuple[torch.Tensor, ...],
    first_rows: torch.Tensor,
    state_rows: torch.Tensor,
    all_single: bool,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> torch.Tensor:
    """`state_space_scan` with a given tile; `operands` are its first eight arguments."""
    x, dt, b, c, *constants, state = operands
    x, b, c = (each if each.stride()[1:] == (each.shape[2], 1) else each.contiguous() for each in (x, b, c))
    dt = dt if dt.stride(1) == 1 else dt.contiguous()
    if not state.is_contiguous():
        raise ValueError(f"a state of strides {state.stride()} cannot be written in place: make it contiguous")
    tokens, heads, dim = x.shape
    out = x.new_empty(tokens, heads, dim)
    options = {"HEADS": heads, "DIM": dim, "SHARE": heads // b.shape[1], "N": b.shape[2], "COLUMNS": tile.columns}
    options |= {"WIDTH": max(16, next_power_of_2(b.shape[2])), "num_warps": tile.warps, **launch_options()}
    rest = (x.stride(0), dt.stride(0), b.stride(0), c.stride(0), *dt_limit)
    grid = (heads * cdiv(dim, tile.columns), len(state_rows))
    if all_single:
        launch(step_kernel, grid, x, dt, b, c, *constants, state, state_rows, out, *rest, **options)
    else:
        options |= {"TOKENS": tile.tokens, "num_stages": tile.stages}
        launch(chunks_kernel, grid, x, dt, b, c, *constants, state, first_rows, state_rows, out, *rest, **options)
    return out
