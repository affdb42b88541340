"""Norm, rotary embedding and K/V write in one Triton kernel: the joint projection is read once.

A program takes some heads of one token, all queries, all keys or all values. The roundings are those of the three ops
one after the other, so that fused and unfused models differ in the order of float32 sums alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.rope.triton import HeadTile, head_blocks, head_tile, rotated
from samovar.kernels.rope_write_kv import rope_write_kv
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2
from samovar.kernels.write_kv.triton import (
    coded,
    copy_heads,
    largest,
    row_scale,
    scale_strides,
    slot_start,
)

NORM_REGISTERS = 64
"""Registers per thread when there is a norm. Without a limit of its own the assembler saves them for more threads: it loads
the weights and the tables only when the sum of squares is done, one wait after the other."""


@triton.jit
def norm_rope_heads(
    x: tl.tensor, out: tl.tensor, scales: tl.tensor, cos: tl.tensor, sin: tl.tensor, weight: tl.tensor,
    head: tl.tensor, kept: tl.tensor, x_head: tl.tensor, out_head: tl.tensor, scale_head: tl.tensor, eps: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """Norm and turn the heads `head` [group, 1] of one token; those below `kept` are stored, as `out` and `scales`
    hold them.

    Loads do not ask for `kept`, which comes from memory itself: waiting for it would cost a second round trip. All but
    those of `x`, `cos` and `sin`, one of which the kernel ahead may have written, come before the wait for that kernel.
    """
    dtype = x.dtype.element_ty
    column = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (column < HALF)
    tail = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
    tail_mask = (head < HEADS) & (tail < DIM)
    if weight is not None:
        first = tl.load(weight + head * 0 + column, mask, 0.0).to(tl.float32)
        second = tl.load(weight + head * 0 + HALF + column, mask, 0.0).to(tl.float32)
        if DIM > 2 * HALF:
            third = tl.load(weight + head * 0 + tail, tail_mask, 0.0).to(tl.float32)
    await_previous(OVERLAP)
    start_next(OVERLAP)
    # Loaded for every head: in the tile's own layout they need no exchange between threads.
    c = tl.load(cos + head * 0 + column, mask, 0.0).to(tl.float32)
    s = tl.load(sin + head * 0 + HALF + column, mask, 0.0).to(tl.float32)
    a = tl.load(x + head * x_head + column, mask, 0.0).to(tl.float32)
    b = tl.load(x + head * x_head + HALF + column, mask, 0.0).to(tl.float32)
    if DIM > 2 * HALF:
        rest = tl.load(x + head * x_head + tail, tail_mask, 0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(a * a + b * b, 1)
        if DIM > 2 * HALF:
            squares += tl.sum(rest * rest, 1)
        factor = tl.rsqrt(squares / DIM + eps)[:, None]
        a = (a * factor * first).to(dtype).to(tl.float32)
        b = (b * factor * second).to(dtype).to(tl.float32)
        if DIM > 2 * HALF:
            rest = (rest * factor * third).to(dtype).to(tl.float32)
    a, b = rotated(a, b, c, s)
    a, b = a.to(dtype), b.to(dtype)
    if DIM > 2 * HALF:
        rest = rest.to(dtype)
    scale = eps  # of what is no code, nothing is asked
    if out.dtype.element_ty.primitive_bitwidth == 8:
        a, b = a.to(tl.float32), b.to(tl.float32)
        size = largest(tl.maximum(tl.abs(a), tl.abs(b), tl.PropagateNan.ALL), mask)
        if DIM > 2 * HALF:
            rest = rest.to(tl.float32)
            size = tl.maximum(size, largest(rest, tail_mask), tl.PropagateNan.ALL)
        scale = row_scale(size, out, scales, head, kept, scale_head, HEADS)
    mask &= head < kept
    tl.store(out + head * out_head + column, coded(a, scale, out), mask)
    tl.store(out + head * out_head + HALF + column, coded(b, scale, out), mask)
    if DIM > 2 * HALF:
        tl.store(out + head * out_head + tail, coded(rest, scale, out), tail_mask & (head < kept))


@triton.jit
def rope_write_kv_kernel(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, slot_mapping: tl.tensor,
    key_scales: tl.tensor, value_scales: tl.tensor,
    q_weight: tl.tensor, k_weight: tl.tensor, out: tl.tensor, eps: tl.tensor, qkv_token: tl.tensor, qkv_head: tl.tensor,
    key_block: tl.tensor, key_offset: tl.tensor, key_head: tl.tensor,
    value_block: tl.tensor, value_offset: tl.tensor, value_head: tl.tensor,
    key_scale_block: tl.tensor, key_scale_offset: tl.tensor, key_scale_head: tl.tensor,
    value_scale_block: tl.tensor, value_scale_offset: tl.tensor, value_scale_head: tl.tensor,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:  # fmt: skip
    """GROUP heads of one token; `*_token`, `*_head`, `*_block`, `*_offset` are strides."""
    Q_PARTS: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    KV_PARTS: tl.constexpr = (KV_HEADS + GROUP - 1) // GROUP
    PARTS: tl.constexpr = Q_PARTS + 2 * KV_PARTS
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    lane = tl.arange(0, GROUP)[:, None]
    qkv += token * qkv_token
    cos += token * 2 * HALF
    sin += token * 2 * HALF
    if part < Q_PARTS:
        norm_rope_heads(
            qkv, out + token * HEADS * DIM, None, cos, sin, q_weight, part * GROUP + lane, HEADS, qkv_head, DIM, 0, eps,
            HEADS, DIM, HALF, HALF_BLOCK, REST_BLOCK, OVERLAP,
        )  # fmt: skip
    elif part < Q_PARTS + KV_PARTS:
        slot = tl.load(slot_mapping + token)
        k_scales = key_scales
        if key_scales is not None:
            k_scales = slot_start(key_scales, slot, key_scale_block, key_scale_offset, BLOCK_SIZE)
        norm_rope_heads(
            qkv + HEADS * qkv_head, slot_start(key_cache, slot, key_block, key_offset, BLOCK_SIZE),
            k_scales, cos, sin, k_weight,
            (part - Q_PARTS) * GROUP + lane, tl.where(slot >= 0, KV_HEADS, 0), qkv_head, key_head, key_scale_head, eps,
            KV_HEADS, DIM, HALF, HALF_BLOCK, REST_BLOCK, OVERLAP,
        )  # fmt: skip
    else:
        slot = tl.load(slot_mapping + token)
        await_previous(OVERLAP)
        start_next(OVERLAP)
        v_scales = value_scales
        if value_scales is not None:
            v_scales = slot_start(value_scales, slot, value_scale_block, value_scale_offset, BLOCK_SIZE)
        copy_heads(
            qkv + (HEADS + KV_HEADS) * qkv_head, slot_start(value_cache, slot, value_block, value_offset, BLOCK_SIZE),
            v_scales,
            (part - Q_PARTS - KV_PARTS) * GROUP + lane, tl.where(slot >= 0, KV_HEADS, 0), qkv_head, value_head,
            value_scale_head, KV_HEADS, DIM, DIM_BLOCK,
        )  # fmt: skip


@rope_write_kv.impl("triton", devices=("cuda",))
def rope_write_kv_triton(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    heads: int,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """One kernel; the caches may be permuted views with whole heads."""
    tile = head_tile(heads, qkv.shape[2])
    tables, weights = (cos, sin), (q_weight, k_weight)
    caches, scales = (key_cache, value_cache), (key_scales, value_scales)
    return rope_write_kv_in(tile, qkv, tables, caches, slot_mapping, weights, eps, heads, scales)


def rope_write_kv_in(
    tile: HeadTile,
    qkv: torch.Tensor,
    tables: tuple[torch.Tensor, torch.Tensor],
    caches: tuple[torch.Tensor, torch.Tensor],
    slot_mapping: torch.Tensor,
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    eps: float,
    heads: int,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """`rope_write_kv` with a given tile."""
    tokens, _, dim = qkv.shape
    cos, sin = (table.contiguous() for table in tables)
    half, block_size, kv_heads = cos.shape[-1] // 2, *caches[0].shape[1:3]
    qkv = qkv if qkv.stride(2) == 1 else qkv.contiguous()
    out = qkv.new_empty(tokens, heads, dim)
    parts = cdiv(heads, tile.group) + 2 * cdiv(kv_heads, tile.group)
    registers = {"maxnreg": NORM_REGISTERS} if any(weight is not None for weight in weights) else {}
    launch(
        rope_write_kv_kernel, (tokens * parts,), qkv, cos, sin, *caches[:2], slot_mapping, *scales, *weights, out,
        eps, *qkv.stride()[:2], *caches[0].stride()[:3], *caches[1].stride()[:3],
        *scale_strides(scales[0]), *scale_strides(scales[1]),
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, HALF=half, BLOCK_SIZE=block_size, **head_blocks(dim, half),
        DIM_BLOCK=next_power_of_2(dim), GROUP=tile.group, num_warps=tile.warps, **registers, **launch_options(),
    )  # fmt: skip
    return out
