"""Residual add and RMS norm in one pass: both inputs are read once, both results written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.add_rms_norm import add_rms_norm
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.rms_norm.triton import NormTile, norm_tile, normalised
from samovar.kernels.triton_launch import cdiv, launch


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x: tl.tensor, residual: tl.tensor, weight: tl.tensor, out: tl.tensor, total: tl.tensor,
    rows: tl.tensor, x_stride: tl.tensor, residual_stride: tl.tensor, eps: tl.tensor,
    DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """total[row] = x[row] + residual[row]; out[row] = rms_norm(total[row]), for ROWS rows."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < DIM)
    scale = tl.load(weight + row * 0 + column, mask, 0.0).to(tl.float32)
    await_previous(OVERLAP)
    first = tl.load(x + row * x_stride + column, mask, 0.0).to(tl.float32)
    second = tl.load(residual + row * residual_stride + column, mask, 0.0).to(tl.float32)
    start_next(OVERLAP)
    # The norm is that of the rounded sum: the residual stream carries no more than its dtype.
    added = (first + second).to(total.dtype.element_ty)
    tl.store(total + row * DIM + column, added, mask)
    value = normalised(added.to(tl.float32), scale, eps, DIM)
    tl.store(out + row * DIM + column, value.to(out.dtype.element_ty), mask)


@add_rms_norm.impl("triton", devices=("cuda",))
def add_rms_norm_triton(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel; rows of x and residual may lie apart."""
    return add_rms_norm_in(norm_tile(x.shape[-1]), x, residual, weight, eps)


def add_rms_norm_in(
    tile: NormTile, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm` with a given tile."""
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual.stride(-1) == 1 else residual.contiguous()
    rows, dim = x.shape
    launch(
        add_rms_norm_kernel, (cdiv(rows, tile.rows),),
        x, residual, weight, out, total, rows, x.stride(0), residual.stride(0), eps,
        DIM=dim, ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, **launch_options(),
    )  # fmt: skip
    return out, total
