"""The K/V write in Triton: one program copies a token's keys and values to its slot."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.triton_launch import launch, next_power_of_2
from samovar.kernels.write_kv import write_kv
from samovar.kernels.write_kv.rows import LARGEST_SCALE, TERMS, bits_of

A4, B4, C4 = (tl.constexpr(term) for term in TERMS[4])
A3, B3, C3 = (tl.constexpr(term) for term in TERMS[3])
A2, B2, C2 = (tl.constexpr(term) for term in TERMS[2])
MOST = tl.constexpr(LARGEST_SCALE)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter loses the carry where it rounds to floats of 8 bits: it gets numbers that need no rounding."""


@triton.jit
def slot_start(
    cache: tl.tensor, slot: tl.tensor, block_stride: tl.tensor, offset_stride: tl.tensor, BLOCK_SIZE: tl.constexpr
) -> tl.tensor:
    """Pointer to the first head of an int64 `slot`."""
    return cache + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * offset_stride


@triton.jit
def largest(x: tl.tensor, mask: tl.tensor) -> tl.tensor:
    """The largest magnitude of each row [rows, columns] -> [rows, 1]; NaN if a row has one."""
    size = tl.where(mask, tl.abs(x), 0.0)
    return (tl.max(size, 1) + tl.sum(tl.where(size == size, 0.0, size), 1))[:, None]


@triton.jit
def row_scale(
    size: tl.tensor, out: tl.tensor, scales: tl.tensor, head: tl.tensor, kept: tl.tensor, scale_head: tl.tensor,
    HEADS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """What rows of the heads `head` [rows, 1] are divided by where `out` holds codes: the scale of their head, or their
    own, which follows from their largest magnitude `size` and is stored for those below `kept`."""
    if out.dtype.element_ty == tl.int8:
        scale = tl.div_rn(size, 127.0)
        tl.store(scales + head * scale_head, scale, (head < HEADS) & (head < kept))
        return scale
    elif scales is None:
        return size * 0 + 1.0
    else:
        return tl.load(scales + head, head < HEADS, 1.0)


@triton.jit
def rounded(x: tl.tensor, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr) -> tl.tensor:
    """float32 to the nearest float of MANTISSA bits, ties to even; those below 2^SMALLEST are multiples of the last bit."""
    DROPPED: tl.constexpr = 23 - MANTISSA
    LIFT: tl.constexpr = 1.5 * 2.0 ** (23 + SMALLEST - MANTISSA)
    bits = x.to(tl.int32, bitcast=True)
    bits = ((bits + (1 << (DROPPED - 1)) - 1 + ((bits >> DROPPED) & 1)) >> DROPPED) << DROPPED
    return tl.where(tl.abs(x) < 2.0**SMALLEST, x + LIFT - LIFT, bits.to(tl.float32, bitcast=True))


@triton.jit
def coded(x: tl.tensor, scale: tl.tensor, out: tl.tensor) -> tl.tensor:
    """x [rows, columns] in the type that `out` points to; codes after division by `scale` [rows, 1]."""
    dtype: tl.constexpr = out.dtype.element_ty
    if dtype == tl.int8:
        is_usable = (scale > 0) & (scale < float("inf"))
        x = tl.div_rn(x.to(tl.float32), tl.where(is_usable, scale, 1.0) + x * 0)
        # Adding and taking away 1.5 * 2^23 rounds to the nearest integer, ties to even.
        return (tl.where(is_usable, x, 0.0) + 12582912.0 - 12582912.0).to(tl.int8)
    elif dtype.is_fp8():
        LIMIT: tl.constexpr = 448.0 if dtype == tl.float8e4nv else 57344.0
        x = tl.div_rn(x.to(tl.float32), scale + x * 0)
        # What is no number stays so.
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -LIMIT), LIMIT), x)
        if INTERPRETED:
            x = rounded(x, 3, -6) if dtype == tl.float8e4nv else rounded(x, 2, -14)
        return x.to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def level(u: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """What codes stand for, in the type of `u`; see `rows.level`."""
    square = u * u
    if BITS == 4:
        return u * (A4 + square * (B4 + square * C4))
    elif BITS == 3:
        return u * (A3 + square * B3)
    else:
        return u * (A2 + square * B2)


@triton.jit
def in_halves(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """[rows, columns] -> every other column from the first on, from the second on."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return even, odd


@triton.jit
def in_bytes(codes: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    """Codes of 1, 2 or 4 bits, next to each other [rows, columns], in bytes."""
    even, odd = in_halves(codes)
    codes = even | (odd << BITS)
    if BITS < 4:
        even, odd = in_halves(codes)
        codes = even | (odd << (2 * BITS))
    if BITS < 2:
        even, odd = in_halves(codes)
        codes = even | (odd << 4)
    return codes.to(tl.uint8)


@triton.jit
def pack_heads(
    value: tl.tensor, mask: tl.tensor, out: tl.tensor, scales: tl.tensor, head: tl.tensor, kept: tl.tensor,
    scale_head: tl.tensor, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr, BITS: tl.constexpr,
) -> None:  # fmt: skip
    """Rows value [heads, DIM_BLOCK], zero where not `mask`, as codes of BITS bits to `out` [heads, 1], their scales beside
    them; those below `kept` are stored."""
    HALF: tl.constexpr = 2 ** (BITS - 1)
    square = tl.sum(value * value, 1)[:, None]
    unit = tl.div_rn(value, tl.sqrt_rn(tl.where(square > 0, square, 1.0) / DIM) + value * 0)
    size, index = tl.abs(unit), tl.zeros(value.shape, tl.int32)
    for i in tl.static_range(1, HALF):
        middle = 0.5 * (level(i - 0.5 + size * 0, BITS) + level(i + 0.5 + size * 0, BITS))
        index += (size > middle).to(tl.int32)
    codes = tl.where(unit >= 0, HALF + index, HALF - 1 - index)
    products = tl.where(mask, value * level(codes.to(tl.float32) - (HALF - 0.5), BITS), 0.0)
    scale = square / tl.where(square > 0, tl.sum(products, 1)[:, None], 1.0)
    is_kept = (head < HEADS) & (head < kept)
    tl.store(scales + head * scale_head, tl.minimum(scale, MOST).to(scales.dtype.element_ty), is_kept)
    if BITS == 3:
        low = tl.arange(0, DIM_BLOCK // 4)[None, :]
        high = tl.arange(0, DIM_BLOCK // 8)[None, :]
        tl.store(out + low, in_bytes(codes & 3, 2), is_kept & (low < DIM // 4))
        tl.store(out + DIM // 4 + high, in_bytes(codes >> 2, 1), is_kept & (high < DIM // 8))
    else:
        at = tl.arange(0, DIM_BLOCK * BITS // 8)[None, :]
        tl.store(out + at, in_bytes(codes, BITS), is_kept & (at < DIM * BITS // 8))


@triton.jit
def copy_heads(
    x: tl.tensor, out: tl.tensor, scales: tl.tensor, head: tl.tensor, kept: tl.tensor, x_head: tl.tensor,
    out_head: tl.tensor, scale_head: tl.tensor, HEADS: tl.constexpr, DIM: tl.constexpr, DIM_BLOCK: tl.constexpr,
    BITS: tl.constexpr = 0,
) -> None:  # fmt: skip
    """Copy the heads `head` [group, 1] of one token; those below `kept` are stored, as `out` and `scales` hold them.
    BITS: of packed codes, 0 for all else.

    The load does not ask for `kept`, which comes from memory itself: waiting for it would cost a second round trip.
    """
    column = tl.arange(0, DIM_BLOCK)[None, :]
    mask = (head < HEADS) & (column < DIM)
    value = tl.load(x + head * x_head + column, mask)
    if BITS > 0:
        value = tl.where(mask, value.to(tl.float32), 0.0)
        to = out + head * out_head
        pack_heads(value, mask, to, scales, head, kept, scale_head, HEADS, DIM, DIM_BLOCK, BITS)
    elif out.dtype.element_ty.primitive_bitwidth == 8:
        value = value.to(tl.float32)
        scale = row_scale(largest(value, mask), out, scales, head, kept, scale_head, HEADS)
        tl.store(out + head * out_head + column, coded(value, scale, out), mask & (head < kept))
    else:
        tl.store(out + head * out_head + column, value.to(out.dtype.element_ty), mask & (head < kept))


@triton.jit
def write_kv_kernel(
    k: tl.tensor, v: tl.tensor, key_cache: tl.tensor, value_cache: tl.tensor, slot_mapping: tl.tensor,
    key_scales: tl.tensor, value_scales: tl.tensor,
    k_token: tl.tensor, k_head: tl.tensor, v_token: tl.tensor, v_head: tl.tensor,
    key_block: tl.tensor, key_offset: tl.tensor, key_head: tl.tensor,
    value_block: tl.tensor, value_offset: tl.tensor, value_head: tl.tensor,
    key_scale_block: tl.tensor, key_scale_offset: tl.tensor, key_scale_head: tl.tensor,
    value_scale_block: tl.tensor, value_scale_offset: tl.tensor, value_scale_head: tl.tensor,
    HEADS: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, KEY_BITS: tl.constexpr, VALUE_BITS: tl.constexpr,
) -> None:  # fmt: skip
    """Write one token; `*_token`, `*_head`, `*_block`, `*_offset` are strides."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    head = tl.arange(0, HEAD_BLOCK)[:, None]
    kept = tl.where(slot >= 0, HEADS, 0)
    keys = slot_start(key_cache, slot, key_block, key_offset, BLOCK_SIZE)
    values = slot_start(value_cache, slot, value_block, value_offset, BLOCK_SIZE)
    k_scales = key_scales
    if key_scales is not None:
        k_scales = slot_start(key_scales, slot, key_scale_block, key_scale_offset, BLOCK_SIZE)
    v_scales = value_scales
    if value_scales is not None:
        v_scales = slot_start(value_scales, slot, value_scale_block, value_scale_offset, BLOCK_SIZE)
    copy_heads(
        k + token * k_token, keys, k_scales, head, kept, k_head, key_head, key_scale_head, HEADS, DIM, DIM_BLOCK, KEY_BITS
    )  # fmt: skip
    copy_heads(
        v + token * v_token, values, v_scales, head, kept, v_head, value_head, value_scale_head, HEADS, DIM, DIM_BLOCK,
        VALUE_BITS,
    )  # fmt: skip


def scale_strides(scales: torch.Tensor | None) -> tuple[int, ...]:
    """Strides of blocks, slots and heads of scales; those of heads are the same for every slot."""
    return (0, 0, 1) if scales is None or scales.dim() == 1 else scales.stride()


@write_kv.impl("triton", devices=("cuda",))
def write_kv_triton(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """One kernel; k and v may be views into a joint projection, the caches permuted views with whole heads."""
    k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (k, v))
    tokens, heads, dim = k.shape
    head_block, dim_block = next_power_of_2(heads), next_power_of_2(dim)
    launch(
        write_kv_kernel, (tokens,), k, v, key_cache, value_cache, slot_mapping, key_scales, value_scales,
        *k.stride()[:2], *v.stride()[:2], *key_cache.stride()[:3], *value_cache.stride()[:3],
        *scale_strides(key_scales), *scale_strides(value_scales),
        HEADS=heads, DIM=dim, BLOCK_SIZE=key_cache.shape[1], HEAD_BLOCK=head_block, DIM_BLOCK=dim_block,
        KEY_BITS=bits_of(key_cache, dim) if key_cache.dtype == torch.uint8 else 0,
        VALUE_BITS=bits_of(value_cache, dim) if value_cache.dtype == torch.uint8 else 0,
        num_warps=min(8, max(1, head_block * dim_block // 256)),
    )  # fmt: skip
