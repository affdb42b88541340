"""What precedes latent attention, in one launch: a program turns some heads of a token's query, or writes its row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.rms_norm.triton import normalised
from samovar.kernels.rope.triton import rotated
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2
from samovar.kernels.write_latent import write_latent

HEADS_AT_ONCE = 16
"""Heads of a query that one program turns."""


@triton.jit
def pair_at(column: tl.tensor, HALF: tl.constexpr, INTERLEAVED: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Where the two features of the pairs `column` are."""
    if INTERLEAVED:
        return 2 * column, 2 * column + 1
    else:
        return column, column + HALF


@triton.jit
def write_latent_kernel(
    q: tl.tensor, row: tl.tensor, weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, cache: tl.tensor,
    slot_mapping: tl.tensor, q_token: tl.tensor, q_head: tl.tensor, row_token: tl.tensor, eps: tl.tensor,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, RANK: tl.constexpr, INTERLEAVED: tl.constexpr,
    GROUP: tl.constexpr, HALF_BLOCK: tl.constexpr, RANK_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Grid (groups of heads and one more, tokens); `*_token`, `*_head` are strides."""
    part, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    HALF: tl.constexpr = ROPE // 2
    column = tl.arange(0, HALF_BLOCK)[None, :]
    first, second = pair_at(column, HALF, INTERLEAVED)
    if part * GROUP < HEADS:
        head = part * GROUP + tl.arange(0, GROUP)[:, None]
        mask = (head < HEADS) & (column < HALF)
        # Loaded for every head: in the tile's own layout they need no exchange between threads.
        c = tl.load(cos + token * ROPE + head * 0 + column, mask).to(tl.float32)
        s = tl.load(sin + token * ROPE + HALF + head * 0 + column, mask).to(tl.float32)
        start = q + token * q_token + head * q_head + NOPE
        # Both of a pair are loaded and stored by one thread: others cannot see half of it done.
        a, b = tl.load(start + first, mask).to(tl.float32), tl.load(start + second, mask).to(tl.float32)
        a, b = rotated(a, b, c, s)
        tl.store(start + first, a.to(q.dtype.element_ty), mask)
        tl.store(start + second, b.to(q.dtype.element_ty), mask)
    else:
        slot = tl.load(slot_mapping + token)
        out = cache + slot * (RANK + ROPE)
        at = tl.arange(0, RANK_BLOCK)[None, :]
        in_rank, is_pair = at < RANK, column < HALF
        x = tl.load(row + token * row_token + at, in_rank, 0.0).to(tl.float32)
        x = normalised(x, tl.load(weight + at, in_rank, 0.0).to(tl.float32), eps, RANK).to(q.dtype.element_ty)
        key_cos = tl.load(cos + token * ROPE + column, is_pair).to(tl.float32)
        key_sin = tl.load(sin + token * ROPE + HALF + column, is_pair).to(tl.float32)
        key = row + token * row_token + RANK
        u, v = tl.load(key + first, is_pair).to(tl.float32), tl.load(key + second, is_pair).to(tl.float32)
        u, v = rotated(u, v, key_cos, key_sin)
        if slot >= 0:
            tl.store(out + at, x.to(cache.dtype.element_ty), in_rank)
            tl.store(out + RANK + first, u.to(q.dtype.element_ty).to(cache.dtype.element_ty), is_pair)
            tl.store(out + RANK + second, v.to(q.dtype.element_ty).to(cache.dtype.element_ty), is_pair)


@write_latent.impl("triton", devices=("cuda",))
def write_latent_triton(
    q: torch.Tensor,
    row: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
) -> None:
    """One kernel; row may be a view into a joint projection. Raises `ValueError` for a cache that is not contiguous."""
    (tokens, heads, query), rank, rope = q.shape, len(weight), cos.shape[-1]
    if not cache.is_contiguous() or q.stride(2) != 1 or row.stride(1) != 1:
        raise ValueError("rows of a latent cache, of queries and of what is cached must be contiguous")
    group = min(HEADS_AT_ONCE, next_power_of_2(heads))
    launch(
        write_latent_kernel, (cdiv(heads, group) + 1, tokens), q, row, weight, cos.contiguous(), sin.contiguous(), cache,
        slot_mapping, q.stride(0), q.stride(1), row.stride(0), eps,
        HEADS=heads, NOPE=query - rope, ROPE=rope, RANK=rank, INTERLEAVED=interleaved,
        GROUP=group, HALF_BLOCK=next_power_of_2(rope // 2), RANK_BLOCK=next_power_of_2(rank), num_warps=4,
    )  # fmt: skip
