"""The rotary tables in one Triton kernel. cos and sin are CUDA's own, exact to an ulp or two at any position."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.rope_table import rope_table
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2


@triton.jit(do_not_specialize=["tokens"])
def rope_table_kernel(
    positions: tl.tensor, per_position: tl.tensor, cos: tl.tensor, sin: tl.tensor, tokens: tl.tensor, magnitude: tl.tensor,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, TOKENS: tl.constexpr,
) -> None:  # fmt: skip
    """Both tables of TOKENS tokens."""
    token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[:, None]).to(tl.int64)
    column = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (token < tokens) & (column < HALF)
    position = tl.load(positions + token + column * 0, mask, 0).to(tl.float32)
    angle = position * tl.load(per_position + token * 0 + column, mask, 0.0).to(tl.float32)
    c = (tl.cos(angle) * magnitude).to(cos.dtype.element_ty)
    s = tl.sin(angle) * magnitude
    at = token * 2 * HALF + column
    tl.store(cos + at, c, mask)
    tl.store(cos + at + HALF, c, mask)
    tl.store(sin + at, (-s).to(sin.dtype.element_ty), mask)
    tl.store(sin + at + HALF, s.to(sin.dtype.element_ty), mask)


@rope_table.impl("triton", devices=("cuda",))
def rope_table_triton(
    positions: torch.Tensor, per_position: torch.Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel; two angles a thread, for each brings the long code of an exact range reduction."""
    tokens, half = positions.shape[0], per_position.shape[0]
    cos, sin = (per_position.new_empty(tokens, 1, 2 * half, dtype=dtype) for _ in range(2))
    half_block = next_power_of_2(half)
    group = max(1, 256 // half_block)
    launch(
        rope_table_kernel, (cdiv(tokens, group),), positions.contiguous(), per_position, cos, sin, tokens,
        magnitude, HALF=half, HALF_BLOCK=half_block, TOKENS=group, num_warps=max(4, half_block // 64),
    )  # fmt: skip
    return cos, sin
