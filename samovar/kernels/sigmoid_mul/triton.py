"""The gate in Triton: both operands are read once, wherever their rows lie."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.sigmoid_mul import sigmoid_mul
from samovar.kernels.silu_mul.triton import gate_tile
from samovar.kernels.triton_launch import cdiv, launch


@triton.jit
def sigmoid_mul_kernel(
    y: tl.tensor, gate: tl.tensor, out: tl.tensor, y_stride: tl.tensor, gate_stride: tl.tensor,
    DIM: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """out[token] = y * sigmoid(gate) for COLUMNS columns; a token's tiles are neighbours in the grid."""
    TILES: tl.constexpr = (DIM + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < DIM
    await_previous(OVERLAP)
    value = tl.load(y + token * y_stride + column, mask, 0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + column, mask, 0.0).to(tl.float32)
    start_next(OVERLAP)
    tl.store(out + token * DIM + column, (value * tl.sigmoid(opened)).to(out.dtype.element_ty), mask)


@sigmoid_mul.impl("triton", devices=("cuda",))
def sigmoid_mul_triton(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """One kernel, rounded once."""
    y, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (y, gate))
    tokens, dim = y.shape
    out = y.new_empty(tokens, dim)
    columns, warps = gate_tile(dim)
    launch(
        sigmoid_mul_kernel, (tokens * cdiv(dim, columns),), y, gate, out, y.stride(0), gate.stride(0),
        DIM=dim, COLUMNS=columns, num_warps=warps, **launch_options(),
    )  # fmt: skip
    return out
