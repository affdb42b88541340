"""Rotary embedding in Triton: queries and keys in one launch, some heads of one token to a program."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from samovar.kernels.rope import rope
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2


class HeadTile(NamedTuple):
    """What one program turns: `group` heads of one token."""

    group: int
    warps: int


def head_tile(heads: int, head_dim: int) -> HeadTile:
    """The tile for `heads` heads: 8 elements of each half of a head per thread, one 16-byte access in 16-bit types."""
    half = next_power_of_2(cdiv(head_dim, 2))
    group = max(1, min(512 // half, next_power_of_2(heads)))
    return HeadTile(group, max(1, group * half // 256))


@triton.jit
def rotated(a: tl.tensor, b: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The paired halves of a head, turned: (a cos - b sin, b cos + a sin)."""
    return a * cos - b * sin, b * cos + a * sin


@triton.jit
def rope_heads(
    x: tl.tensor, out: tl.tensor, cos: tl.tensor, sin: tl.tensor, head: tl.tensor, head_stride: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Turn the heads `head` [group, 1] of one token; all pointers are at that token, `out` is contiguous."""
    column = tl.arange(0, HALF_BLOCK)[None, :]
    mask = (head < HEADS) & (column < HALF)
    a = tl.load(x + head * head_stride + column, mask).to(tl.float32)
    b = tl.load(x + head * head_stride + HALF + column, mask).to(tl.float32)
    # Loaded for every head: in the tile's own layout they need no exchange between threads.
    c = tl.load(cos + head * 0 + column, mask).to(tl.float32)
    s = tl.load(sin + head * 0 + HALF + column, mask).to(tl.float32)
    a, b = rotated(a, b, c, s)
    tl.store(out + head * DIM + column, a.to(out.dtype.element_ty), mask)
    tl.store(out + head * DIM + HALF + column, b.to(out.dtype.element_ty), mask)
    if DIM > 2 * HALF:
        column = 2 * HALF + tl.arange(0, REST_BLOCK)[None, :]
        mask = (head < HEADS) & (column < DIM)
        tl.store(out + head * DIM + column, tl.load(x + head * head_stride + column, mask), mask)


@triton.jit
def rope_kernel(
    q: tl.tensor, k: tl.tensor, cos: tl.tensor, sin: tl.tensor, q_out: tl.tensor, k_out: tl.tensor,
    q_token: tl.tensor, q_head: tl.tensor, k_token: tl.tensor, k_head: tl.tensor, table_token: tl.tensor,
    Q_HEADS: tl.constexpr, K_HEADS: tl.constexpr, DIM: tl.constexpr, HALF: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, GROUP: tl.constexpr,
) -> None:  # fmt: skip
    """Turn GROUP query heads, or GROUP key heads, of one token; `*_token`, `*_head` are strides."""
    Q_PARTS: tl.constexpr = (Q_HEADS + GROUP - 1) // GROUP
    PARTS: tl.constexpr = Q_PARTS + (K_HEADS + GROUP - 1) // GROUP
    token = (tl.program_id(0) // PARTS).to(tl.int64)
    part = tl.program_id(0) % PARTS
    lane = tl.arange(0, GROUP)[:, None]
    cos += token * table_token
    sin += token * table_token
    if part < Q_PARTS:
        rope_heads(
            q + token * q_token, q_out + token * Q_HEADS * DIM, cos, sin, part * GROUP + lane, q_head,
            Q_HEADS, DIM, HALF, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip
    else:
        rope_heads(
            k + token * k_token, k_out + token * K_HEADS * DIM, cos, sin, (part - Q_PARTS) * GROUP + lane, k_head,
            K_HEADS, DIM, HALF, HALF_BLOCK, REST_BLOCK,
        )  # fmt: skip


@rope.impl("triton", devices=("cuda",))
def rope_triton(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """One kernel for both; q and k may be views into a joint projection, the results are contiguous."""
    (tokens, heads, dim), kv_heads, half = q.shape, k.shape[1], cos.shape[-1] // 2
    q, k = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k))
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    group, warps = head_tile(heads, dim)
    parts = cdiv(heads, group) + cdiv(kv_heads, group)
    launch(
        rope_kernel, (tokens * parts,), q, k, cos.contiguous(), sin.contiguous(), q_out, k_out,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), 2 * half,
        Q_HEADS=heads, K_HEADS=kv_heads, DIM=dim, HALF=half, GROUP=group, num_warps=warps, **head_blocks(dim, half),
    )  # fmt: skip
    return q_out, k_out


def head_blocks(dim: int, half: int) -> dict[str, int]:
    """The powers of two that cover a turned half of a head and the features that are not turned."""
    rest = max(1, dim - 2 * half)
    return {"HALF_BLOCK": next_power_of_2(half), "REST_BLOCK": next_power_of_2(rest)}
