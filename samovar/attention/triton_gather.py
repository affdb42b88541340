"""A paged sequence made contiguous, and two partial results of attention made one."""

from __future__ import annotations

import triton
import triton.language as tl

from samovar.attention.triton_tiles import load_rows


@triton.jit(do_not_specialize=["table_stride", "seq", "begin", "size"])
def gather_keys(
    to_keys: tl.tensor,  # [kv_heads * COPIES, size, HEAD_DIM]
    to_values: tl.tensor,
    keys: tl.tensor,  # [num_blocks, PAGE, kv_heads, HEAD_DIM] with the strides given
    values: tl.tensor,
    totals: tl.tensor,
    table_rows: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    seq: tl.tensor,
    begin: tl.tensor,
    size: tl.tensor,
    key_scales: tl.tensor,  # of heads [kv_heads], or of rows [num_blocks, PAGE, kv_heads], or None
    value_scales: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    KEY_HEAD: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    VALUE_HEAD: tl.constexpr,
    KEY_SCALE_BLOCK: tl.constexpr,
    KEY_SCALE_HEAD: tl.constexpr,
    VALUE_SCALE_BLOCK: tl.constexpr,
    VALUE_SCALE_HEAD: tl.constexpr,
    IS_CODED: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    DIM: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (size / BLOCK, kv_heads): `size` tokens of sequence `seq` from `begin` on, zeros where there are fewer; COPIES
    of each head side by side. Codes become numbers."""
    head = tl.program_id(1)
    row, offs_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
    at = begin + row
    in_head, is_token = (offs_d < HEAD_DIM)[None, :], at < tl.load(totals + seq)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    block = tl.load(table + at // PAGE, mask=is_token, other=0).to(tl.int64)
    offset = at % PAGE
    k_at, v_at = block * KEY_BLOCK + offset * KEY_TOKEN, block * VALUE_BLOCK + offset * VALUE_TOKEN
    COMPUTE: tl.constexpr = tl.float32 if IS_CODED else keys.dtype.element_ty
    k = load_rows(keys + head * KEY_HEAD, k_at, is_token, True, HEAD_DIM, DIM, COMPUTE, KEY_BITS)
    v = load_rows(values + head * VALUE_HEAD, v_at, is_token, True, HEAD_DIM, DIM, COMPUTE, VALUE_BITS)
    if HAS_ROW_SCALES:
        k_at, v_at = block * KEY_SCALE_BLOCK + offset, block * VALUE_SCALE_BLOCK + offset
        k *= tl.load(key_scales + head * KEY_SCALE_HEAD + k_at, mask=is_token, other=0.0).to(tl.float32)[:, None]
        v *= tl.load(value_scales + head * VALUE_SCALE_HEAD + v_at, mask=is_token, other=0.0).to(tl.float32)[:, None]
    elif IS_CODED and key_scales is not None:
        k *= tl.load(key_scales + head)
        v *= tl.load(value_scales + head)
    k, v = k.to(to_keys.dtype.element_ty), v.to(to_values.dtype.element_ty)
    for copy in tl.static_range(COPIES):
        to = ((head.to(tl.int64) * COPIES + copy) * size + row)[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(to_keys + to, k, mask=(row < size)[:, None] & in_head)
        tl.store(to_values + to, v, mask=(row < size)[:, None] & in_head)


@triton.jit(do_not_specialize=["lead", "size"])
def join_two(
    out: tl.tensor,  # [rows, HEADS, HEAD_DIM]
    one: tl.tensor,  # [size, HEADS, HEAD_DIM]; row i of out is row lead + i
    one_sums: tl.tensor,  # [HEADS, size] float32, natural log-sum-exp of scores
    two: tl.tensor,
    two_sums: tl.tensor,
    lead: tl.tensor,
    size: tl.tensor,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """Grid (rows,): attention over two sets of keys from attention over each."""
    row = tl.program_id(0)
    heads, offs_d = tl.arange(0, ROWS), tl.arange(0, DIM)
    is_head = heads < HEADS
    mask = is_head[:, None] & (offs_d < HEAD_DIM)[None, :]
    a = tl.load(one_sums + heads * size + lead + row, mask=is_head, other=0.0)
    b = tl.load(two_sums + heads * size + lead + row, mask=is_head, other=0.0)
    # The share of the first is e^a / (e^a + e^b).
    share = tl.sigmoid(a - b)[:, None]
    at = heads[:, None] * HEAD_DIM + offs_d[None, :]
    start = (row + lead).to(tl.int64) * (HEADS * HEAD_DIM)
    first = tl.load(one + start + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(two + start + at, mask=mask, other=0.0).to(tl.float32)
    result = second + share * (first - second)
    tl.store(out + row.to(tl.int64) * (HEADS * HEAD_DIM) + at, result.to(out.dtype.element_ty), mask=mask)
