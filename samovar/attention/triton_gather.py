"""A paged sequence made contiguous, and two partial results of attention made one."""

from __future__ import annotations

import triton
import triton.language as tl


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
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (size / BLOCK, kv_heads): `size` tokens of sequence `seq` from `begin` on, zeros where there are fewer; COPIES
    of each head side by side."""
    head = tl.program_id(1)
    row, offs_d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIM)
    at = begin + row
    in_head, is_token = (offs_d < HEAD_DIM)[None, :], at < tl.load(totals + seq)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    block = tl.load(table + at // PAGE, mask=is_token, other=0).to(tl.int64)
    where = (block * BLOCK_STRIDE + (at % PAGE) * TOKEN_STRIDE + head * HEAD_STRIDE)[:, None] + offs_d[None, :]
    mask = is_token[:, None] & in_head
    k = tl.load(keys + where, mask=mask, other=0.0)
    v = tl.load(values + where, mask=mask, other=0.0)
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
