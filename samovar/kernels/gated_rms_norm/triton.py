"""The gated norm in Triton: rows of groups; values and gates are read once, results written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.gated_rms_norm import gated_rms_norm
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.rms_norm.triton import norm_tile
from samovar.kernels.triton_launch import cdiv, launch


@triton.jit(do_not_specialize=["rows"])
def gated_rms_norm_kernel(
    x: tl.tensor, gate: tl.tensor, weight: tl.tensor, out: tl.tensor, rows: tl.tensor, x_stride: tl.tensor, gate_stride: tl.tensor,
    eps: tl.tensor,
    GROUPS: tl.constexpr, GROUP: tl.constexpr, IS_SHARED: tl.constexpr, GATES_LAST: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """out[row] for ROWS rows; row r is group r % GROUPS of token r // GROUPS."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < GROUP)
    token, place = (row // GROUPS).to(tl.int64), row % GROUPS * GROUP + column
    if IS_SHARED:
        scale = tl.load(weight + row * 0 + column, mask, 0.0).to(tl.float32)
    else:
        scale = tl.load(weight + place, mask, 0.0).to(tl.float32)
    await_previous(OVERLAP)
    value = tl.load(x + token * x_stride + place, mask, 0.0).to(tl.float32)
    opened = tl.load(gate + token * gate_stride + place, mask, 0.0).to(tl.float32)
    start_next(OVERLAP)
    opened *= tl.sigmoid(opened)
    if not GATES_LAST:
        value *= opened
    value = value * tl.rsqrt(tl.sum(value * value, 1) / GROUP + eps)[:, None] * scale
    if GATES_LAST:
        value *= opened
    tl.store(out + token * (GROUPS * GROUP) + place, value.to(out.dtype.element_ty), mask)


@gated_rms_norm.impl("triton", devices=("cuda",))
def gated_rms_norm_triton(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, group: int, gates_last: bool
) -> torch.Tensor:
    """One kernel."""
    x, gate = (each if each.stride(1) == 1 else each.contiguous() for each in (x, gate))
    tokens, dim = x.shape
    tile, groups = norm_tile(group), dim // group
    out = x.new_empty(tokens, dim)
    launch(
        gated_rms_norm_kernel, (cdiv(tokens * groups, tile.rows),),
        x, gate, weight, out, tokens * groups, x.stride(0), gate.stride(0), eps,
        GROUPS=groups, GROUP=group, IS_SHARED=len(weight) == group, GATES_LAST=gates_last,
        ROWS=tile.rows, COLUMNS=tile.columns, num_warps=tile.warps, **launch_options(),
    )  # fmt: skip
    return out
