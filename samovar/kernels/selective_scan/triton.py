"""The selective scan in Triton: one program for some channels of a sequence, token by token, with their state in registers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.selective_scan import selective_scan
from samovar.kernels.state_space_scan.triton import softplus
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2

COLUMNS = 32
"""Channels of a program."""


@triton.jit
def selective_scan_kernel(
    x: tl.tensor, dt: tl.tensor, b: tl.tensor, c: tl.tensor, rates: tl.tensor, skip: tl.tensor,
    state: tl.tensor, first_rows: tl.tensor, state_rows: tl.tensor, out: tl.tensor,
    x_stride: tl.tensor, dt_stride: tl.tensor, b_stride: tl.tensor, c_stride: tl.tensor,
    CHANNELS: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """out [tokens, COLUMNS] of a sequence, and its part of the state."""
    sequence = tl.program_id(1)
    column, n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, WIDTH)
    is_column, is_n = column < CHANNELS, n < N
    inside = is_column[:, None] & is_n[None, :]
    place = column[:, None] * N + n[None, :]
    rate = tl.load(rates + place, inside, 0.0)
    factor = tl.load(skip + column, is_column, 0.0)
    await_previous(OVERLAP)
    start_next(OVERLAP)
    first = tl.load(first_rows + sequence).to(tl.int64)
    count = (tl.load(first_rows + sequence + 1) - first).to(tl.int32)
    own = state + tl.load(state_rows + sequence).to(tl.int64) * (CHANNELS * N) + place
    held = tl.load(own, inside, 0.0).to(tl.float32)
    for token in range(count):
        at = first + token
        step = softplus(tl.load(dt + at * dt_stride + column, is_column, 0.0).to(tl.float32))
        value = tl.load(x + at * x_stride + column, is_column, 0.0).to(tl.float32)
        key = tl.load(b + at * b_stride + n, is_n, 0.0).to(tl.float32)
        query = tl.load(c + at * c_stride + n, is_n, 0.0).to(tl.float32)
        held = held * tl.exp(step[:, None] * rate) + (step * value)[:, None] * key[None, :]
        y = tl.sum(held * query[None, :], 1) + factor * value
        tl.store(out + at * CHANNELS + column, y.to(out.dtype.element_ty), is_column)
    tl.store(own, held.to(state.dtype.element_ty), inside)


@selective_scan.impl("triton", devices=("cuda",))
def selective_scan_triton(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    rates: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    first_rows: torch.Tensor,
    state_rows: torch.Tensor,
    new_tokens: Sequence[int],
    all_single: bool,
) -> torch.Tensor:
    """One kernel; rows of x, dt, b and c may lie apart."""
    x, dt, b, c = (each if each.stride(1) == 1 else each.contiguous() for each in (x, dt, b, c))
    if not state.is_contiguous():
        raise ValueError(f"a state of strides {state.stride()} cannot be written in place: make it contiguous")
    (tokens, channels), n = x.shape, b.shape[1]
    out = x.new_empty(tokens, channels)
    launch(
        selective_scan_kernel, (cdiv(channels, COLUMNS), len(state_rows)),
        x, dt, b, c, rates, skip, state, first_rows, state_rows, out, x.stride(0), dt.stride(0), b.stride(0), c.stride(0),
        CHANNELS=channels, N=n, COLUMNS=COLUMNS, WIDTH=next_power_of_2(n), num_warps=2, **launch_options(),
    )  # fmt: skip
    return out
