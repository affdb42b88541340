"""Paged decode attention in Triton: one query per sequence, its keys read once, split over programs where few would work.

A program owns one sequence, one head of keys and one part of the sequence's keys. The query heads that share those keys
are the rows of its tiles, so that every byte of the cache is read once. Parts leave their sums unnormalised in a
workspace, and whichever program of a sequence and head is last joins them, always in the same order: no second launch,
and no dependence on which one it was (Flash-Decoding, Dao et al. 2023; online softmax, Milakov and Gimelshein 2018).

Where kernels overlap, a program reads its block ids before the kernel ahead, which writes the query and the newest key
and value, has ended (the rules are those of kernels/overlap). Asking for keys by then does not pay: measured on an H200,
it cost up to 8 % of this kernel's time where keys are split, and gained nothing elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samovar.attention.triton_tiles import (
    LOG2E,
    VALUE_FACTOR,
    finished,
    load_pairs,
    load_rows,
    load_scales,
    product,
    scaled_scores,
    side_by_side,
    unit_rows,
)
from samovar.kernels.overlap.triton import await_previous, start_next


@triton.jit(do_not_specialize=["splits", "table_stride"])
def decode_attention(
    out: tl.tensor,  # [rows, heads, HEAD_DIM]
    q: tl.tensor,  # [rows, heads, HEAD_DIM]; row i is sequence i's
    keys: tl.tensor,  # [num_blocks, PAGE, kv_heads, HEAD_DIM] with the strides given
    values: tl.tensor,
    sinks: tl.tensor,  # [heads] float32, or None
    totals: tl.tensor,  # [num_seqs]
    table_rows: tl.tensor,  # [num_seqs]
    tables: tl.tensor,  # [.., table_stride]
    partial: tl.tensor,  # [num_seqs, kv_heads, splits, GROUP, HEAD_DIM] float32
    norms: tl.tensor,  # [num_seqs, kv_heads, splits, GROUP, 2] float32: largest score (base 2), sum of weights
    counters: tl.tensor,  # [num_seqs * kv_heads], zero before and after
    splits: tl.tensor,
    table_stride: tl.tensor,
    scale: tl.tensor,
    key_scales: tl.tensor,  # of heads [kv_heads], or of rows [num_blocks, PAGE, kv_heads], or None
    value_scales: tl.tensor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
    OVERLAP: tl.constexpr,
    IS_ROOMY: tl.constexpr,
) -> None:
    """Grid (kv_heads, num_seqs, splits). MOST_SPLITS: 1 if splits is 1, else the most that may come; ROWS and DIM: GROUP
    and HEAD_DIM padded; COMPUTE: what tiles are multiplied in; IS_CODED: the cache holds codes; IS_ROOMY: programs of the
    next kernel may come and wait beside these."""
    kv_head, seq, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    total = tl.load(totals + seq)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    first = 0
    if WINDOW > 0:
        first = tl.maximum(total - WINDOW, 0)
    elif WINDOW < 0:  # chunks of -WINDOW keys
        first = tl.maximum(total - 1, 0) // -WINDOW * -WINDOW
    part = tl.cdiv(tl.cdiv(total - first, splits), BLOCK_N) * BLOCK_N
    start = first + split * part
    stop = tl.minimum(start + part, total)
    # Short sequences need fewer parts. The first is there even if there are no keys: it writes the zeros.
    if split > 0 and start >= total:
        return

    keys += kv_head * KEY_HEAD
    values += kv_head * VALUE_HEAD
    offs_n, offs_d, offs_m = tl.arange(0, BLOCK_N), tl.arange(0, DIM), tl.arange(0, ROWS)
    # Block ids are fetched one tile ahead: an address must not wait for them.
    blocks = tl.load(table + (start + offs_n) // PAGE, mask=start + offs_n < stop, other=0)
    await_previous(OVERLAP)
    if IS_ROOMY:
        start_next(OVERLAP)
    in_head, in_group = offs_d < HEAD_DIM, offs_m < GROUP
    heads = (seq * KV_HEADS + kv_head).to(tl.int64) * GROUP + offs_m
    at_q = heads[:, None] * HEAD_DIM + offs_d[None, :]
    query = tl.load(q + at_q, mask=in_group[:, None] & in_head[None, :], other=0.0)
    value_scale = 1.0
    if IS_CODED:
        query, size = unit_rows(query, COMPUTE)
        scale = scale * size
        if HAS_ROW_SCALES:
            value_scale = 1.0 / VALUE_FACTOR
            key_scales += kv_head * KEY_SCALE_HEAD
            value_scales += kv_head * VALUE_SCALE_HEAD
        elif key_scales is not None:
            scale *= tl.load(key_scales + kv_head)
            value_scale = tl.load(value_scales + kv_head)
    else:
        query = query.to(COMPUTE)
    most = tl.full((ROWS,), float("-inf"), tl.float32)
    weight = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, DIM // 2 if VALUE_BITS == 8 else DIM), tl.float32)
    odd_sums = sums
    for begin in tl.range(start, stop, BLOCK_N):
        at = begin + offs_n
        is_live = at < stop
        page, offset = blocks.to(tl.int64), at % PAGE
        blocks = tl.load(table + (at + BLOCK_N) // PAGE, mask=at + BLOCK_N < stop, other=0)
        k = load_rows(keys, page * KEY_BLOCK + offset * KEY_TOKEN, is_live, True, HEAD_DIM, DIM, COMPUTE, KEY_BITS)
        at_v = page * VALUE_BLOCK + offset * VALUE_TOKEN
        if VALUE_BITS == 8:
            v, odd_v = load_pairs(values, at_v, is_live, True, HEAD_DIM, DIM, COMPUTE)
        else:
            v = load_rows(values, at_v, is_live, True, HEAD_DIM, DIM, COMPUTE, VALUE_BITS)
        products = product(query, tl.trans(k), None)
        if HAS_ROW_SCALES:
            products *= load_scales(key_scales, page * KEY_SCALE_BLOCK + offset, is_live, True)
        scores = scaled_scores(products, scale, SOFTCAP)
        scores = tl.where(is_live[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        decay, weights = tl.exp2(most - higher), tl.exp2(scores - higher[:, None])
        most, weight = higher, weight * decay + tl.sum(weights, 1)
        if HAS_ROW_SCALES:
            weights *= VALUE_FACTOR * load_scales(value_scales, page * VALUE_SCALE_BLOCK + offset, is_live, True)
        sums = product(weights.to(COMPUTE), v, sums * decay[:, None])
        if VALUE_BITS == 8:
            odd_sums = product(weights.to(COMPUTE), odd_v, odd_sums * decay[:, None])
    if not IS_ROOMY:
        start_next(OVERLAP)
    if VALUE_BITS == 8:
        sums = side_by_side(sums, odd_sums, ROWS, DIM)
    if IS_CODED:
        sums *= value_scale

    if MOST_SPLITS == 1:
        result = finished(sums, most, weight, sinks, kv_head * GROUP + offs_m, in_group)
        tl.store(out + at_q, result.to(out.dtype.element_ty), mask=in_group[:, None] & in_head[None, :])
    else:
        unit = (seq * KV_HEADS + kv_head).to(tl.int64)
        mine = (unit * splits + split) * GROUP + offs_m
        at_partial = mine[:, None] * HEAD_DIM + offs_d[None, :]
        tl.store(partial + at_partial, sums, mask=in_group[:, None] & in_head[None, :])
        tl.store(norms + mine * 2, most, mask=in_group)
        tl.store(norms + mine * 2 + 1, weight, mask=in_group)
        tl.debug_barrier()  # All threads' sums are written before one thread counts them as such.
        num_parts = tl.maximum(tl.cdiv(total - first, tl.maximum(part, 1)), 1)
        if tl.atomic_add(counters + unit, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
            tl.store(counters + unit, 0)
            _join(out, partial, norms, sinks, unit, kv_head, num_parts, splits, GROUP, HEAD_DIM, MOST_SPLITS, DIM)


@triton.jit
def _join(
    out: tl.tensor,
    partial: tl.tensor,
    norms: tl.tensor,
    sinks: tl.tensor,
    unit: tl.tensor,
    kv_head: tl.tensor,
    num_parts: tl.tensor,
    splits: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    DIM: tl.constexpr,
) -> None:
    """The parts of one sequence and head of keys, by log-sum-exp, one query head at a time, four under way."""
    offs_s, offs_d = tl.arange(0, MOST_SPLITS), tl.arange(0, DIM)
    is_part, in_head = offs_s < num_parts, offs_d < HEAD_DIM
    for start in tl.range(0, GROUP, 4):
        for step in tl.static_range(4 if GROUP > 4 else GROUP):
            member = tl.minimum(start + step, GROUP - 1)
            at = (unit * splits + offs_s) * GROUP + member
            most = tl.load(norms + at * 2, mask=is_part, other=float("-inf"))
            weight = tl.load(norms + at * 2 + 1, mask=is_part, other=0.0)
            where = at[:, None] * HEAD_DIM + offs_d[None, :]
            sums = tl.load(partial + where, mask=is_part[:, None] & in_head[None, :], other=0.0)
            highest = tl.max(most, 0)
            if sinks is not None:
                sink = tl.load(sinks + kv_head * GROUP + member) * LOG2E
                highest = tl.maximum(highest, sink)
            highest = tl.where(highest == float("-inf"), 0.0, highest)  # a sequence without keys
            share = tl.exp2(most - highest)
            whole = tl.sum(weight * share, 0)
            if sinks is not None:
                whole += tl.exp2(sink - highest)
            result = tl.sum(sums * share[:, None], 0) / tl.where(whole > 0, whole, 1.0)
            to = out + (unit * GROUP + member) * HEAD_DIM + offs_d
            tl.store(to, result.to(out.dtype.element_ty), mask=in_head)
