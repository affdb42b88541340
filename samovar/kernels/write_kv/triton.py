"""The K/V write in Triton: one program copies a token's keys and values to its slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.triton_launch import launch, next_power_of_2
from samovar.kernels.write_kv import write_kv


@triton.jit
def slot_start(
    cache: tl.tensor, slot: tl.tensor, block_stride: tl.tensor, offset_stride: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Pointer to the first head of an int64 `slot`."""
    return cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride


@triton.jit
def copy_heads(
    x: tl.tensor, out: tl.tensor, head: tl.tensor, kept: tl.tensor, x_head: tl.tensor, out_head: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Copy the heads `head` [group, 1] of one token; those below `kept` are stored, in the dtype of `out`.

    The load does not ask for `kept`, which comes from memory itself: waiting for it would cost a second round trip.
    """
    column = tl.arange(0, DIM_BLOCK)[None, :]
    mask = (head < HEADS) & (column < DIM)
    value = tl.load(x + head * x_head + column, mask)
    tl.store(out + head * out_head + column, value.to(out.dtype.element_ty), mask & (head < kept))


@triton.jit
def write_kv_kernel(
    k: tl.tensor, v: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, slot_mapping: tl.tensor,
    k_token: tl.tensor, k_head: tl.tensor, v_token: tl.tensor, v_head: tl.tensor,
    key_block: tl.tensor, key_offset: tl.tensor, key_head: tl.tensor,
    value_block: tl.tensor, value_offset: tl.tensor, value_head: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write one token; `*_token`, `*_head`, `*_block`, `*_offset` are strides."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    kept = tl.where(slot >= 0, HEADS, 0)
    keys = slot_start(key_cache, slot, key_block, key_offset, BLOCK_SIZE)
    values = slot_start(value_cache, slot, value_block, value_offset, BLOCK_SIZE)
    copy_heads(k + token * k_token, keys, head, kept, k_head, key_head, HEADS, DIM, DIM_BLOCK)
    copy_heads(v + token * v_token, values, head, kept, v_head, value_head, HEADS, DIM, DIM_BLOCK)


@write_kv.impl("triton", devices=("cuda",))
def write_kv_triton(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """One kernel; k and v may be views into a joint projection, the caches permuted views with whole heads."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    tokens, heads, dim = k.shape
    head_block, dim_block = next_power_of_2(heads), next_power_of_2(dim)
    launch(
        write_kv_kernel, (tokens,), k, v, key_cache, value_cache, slot_mapping,
        *k.stride()[:2], *v.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        HEADS=heads, DIM=dim, BLOCK_SIZE=key_cache.shape[1], HEAD_BLOCK=head_block, DIM_BLOCK=dim_block,
        num_warps=min(8, max(1, head_block * dim_block // 256)),
    )  # fmt: skip
