"""RMS norm in Triton: a row never leaves the registers between its sum of squares and its scaling."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.rms_norm import rms_norm
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2


class NormTile(NamedTuple):
    """What one program normalises: `rows` rows of `columns` (a power of two, at least the row's length)."""

    rows: int
    columns: int
    warps: int


def norm_tile(dim: int) -> NormTile:
    """The tile for rows of `dim` elements: short rows share a program, long ones get more warps.

    A thread holds 8 elements, one access of 16 bytes in 16-bit types, up to 1024 columns; then 16, two in flight.
    """
    columns = next_power_of_2(dim)
    if columns <= 1024:
        return NormTile(max(1, 1024 // columns), columns, 4)
    return NormTile(1, columns, min(16, max(4, columns // 512)))


@triton.jit
def normalised(x: tl.tensor, weight: tl.tensor, eps: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """x / rms(x) * weight for a float32 tile [rows, columns] whose masked elements are 0; `weight` broadcasts."""
    return x * tl.rsqrt(tl.sum(x * x, 1) / DIM + eps)[:, None] * weight


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x: tl.tensor, weight: tl.tensor, out: tl.tensor, rows: tl.tensor, token_stride: tl.tensor, head_stride: tl.tensor, eps: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """out[row] = rms_norm(x[row]) for ROWS rows; row r is head r % HEADS of token r // HEADS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < DIM)
    at = (row // HEADS).to(tl.int64) * token_stride + row % HEADS * head_stride + column
    # Loaded for every row: in the tile's own layout it needs no exchange between threads.
    scale = tl.load(weight + row * 0 + column, mask, 0.0).to(tl.float32)
    await_previous(OVERLAP)
    value = tl.load(x + at, mask, 0.0).to(tl.float32)
    start_next(OVERLAP)
    value = normalised(value, scale, eps, DIM)
    tl.store(out + row.to(tl.int64) * DIM + column, value.to(out.dtype.element_ty), mask)


@rms_norm.impl("triton", devices=("cuda",))
def rms_norm_triton(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """One kernel; x [tokens, dim] or [tokens, heads, dim] may be a view with any strides but the last, which is 1."""
    return rms_norm_in(norm_tile(x.shape[-1]), x, weight, eps)


def rms_norm_in(tile: NormTile, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`rms_norm` with a given tile."""
    out = x.new_empty(x.shape)
    if x.dim() not in (2, 3) or x.stride(-1) != 1:
        x = x.reshape(-1, x.shape[-1]).contiguous()
    dim, heads = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    rows = x.shape[0] * heads
    launch(
        rms_norm_kernel, (cdiv(rows, tile.rows),), x, weight, out, rows, x.stride(0), x.stride(-2), eps,
        HEADS=heads, DIM=dim, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, **launch_options(),
    )  # fmt: skip
    return out
