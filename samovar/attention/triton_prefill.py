"""Paged attention in Triton for sequences with any number of new tokens: prompts, chunks with history, verification.

All such sequences of a step are one launch. A program owns one head of keys and a tile of rows, each row one query head
of one token: the heads that share keys lie next to each other, so a few tokens fill a tile as well as many do. Tiles of
keys that every row sees take a path without masks (FlashAttention-2, Dao 2023).
"""

from __future__ import annotations

import triton
import triton.language as tl

from samovar.attention.triton_tiles import (
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


@triton.jit(do_not_specialize=["table_stride", "first_seq", "stop_seq"])
def prefill_attention(
    out: tl.tensor,  # [rows, heads, HEAD_DIM]
    q: tl.tensor,  # [rows, heads, HEAD_DIM]
    keys: tl.tensor,  # [num_blocks, PAGE, kv_heads, HEAD_DIM] with the strides given
    values: tl.tensor,
    sinks: tl.tensor,  # [heads] float32, or None
    first_rows: tl.tensor,  # [num_seqs + 1]
    totals: tl.tensor,  # [num_seqs]
    table_rows: tl.tensor,  # [num_seqs]
    tables: tl.tensor,  # [.., table_stride]
    table_stride: tl.tensor,
    first_seq: tl.tensor,
    stop_seq: tl.tensor,
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
    EXACT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """Grid (kv_heads, tiles) for the sequences first_seq .. stop_seq; more tiles than needed do nothing.

    EXACT: every tile of keys takes the masked path, so that a row's result does not depend on its place in a chunk.
    """
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    kv_head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest go first
    # Sequence s has the tiles from (rows before it) // TOKENS + (sequences before it) on: that is room enough.
    base = tl.load(first_rows + first_seq)
    seq, highest = first_seq, stop_seq - 1
    while seq < highest:
        middle = (seq + highest + 1) // 2
        if (tl.load(first_rows + middle) - base) // TOKENS + middle - first_seq <= tile:
            seq = middle
        else:
            highest = middle - 1
    first_row = tl.load(first_rows + seq)
    new = tl.load(first_rows + seq + 1) - first_row
    token = (tile - (first_row - base) // TOKENS - (seq - first_seq)) * TOKENS
    if token >= new:
        return
    total = tl.load(totals + seq)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride

    offs_m, offs_d = tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    tokens = token + offs_m // GROUP
    heads = kv_head * GROUP + offs_m % GROUP
    is_row, in_head = (offs_m < TOKENS * GROUP) & (tokens < new), offs_d < HEAD_DIM
    at_q = ((first_row + tokens).to(tl.int64) * (KV_HEADS * GROUP) + heads)[:, None] * HEAD_DIM + offs_d[None, :]
    query = tl.load(q + at_q, mask=is_row[:, None] & in_head[None, :], other=0.0)
    keys += kv_head * KEY_HEAD
    values += kv_head * VALUE_HEAD
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
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, DIM // 2 if VALUE_BITS == 8 else DIM), tl.float32)
    odd_sums = sums

    at_first = total - new + token
    at = total - new + tokens
    stop = tl.minimum(at_first + TOKENS, total)
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(at_first - WINDOW + 1, 0)
    elif WINDOW < 0:  # chunks of -WINDOW keys
        oldest = at_first // -WINDOW * -WINDOW
    start = oldest // BLOCK_N * BLOCK_N
    if EXACT:
        sums, odd_sums, most, weight = _attend(
            sums, odd_sums, most, weight, query, keys, values, key_scales, value_scales, table, at, start, stop,
            oldest, stop, scale, HEAD_DIM, PAGE, KEY_BLOCK, KEY_TOKEN, VALUE_BLOCK, VALUE_TOKEN, KEY_SCALE_BLOCK,
            VALUE_SCALE_BLOCK, KEY_BITS, VALUE_BITS, HAS_ROW_SCALES, WINDOW, SOFTCAP, True, BLOCK_N, DIM, COMPUTE,
        )  # fmt: skip
    else:
        # Tiles that all rows see whole lie between these two.
        seen_by_last, seen_by_first = start, (at_first + 1) // BLOCK_N * BLOCK_N
        if WINDOW != 0:
            newest = stop - WINDOW if WINDOW > 0 else (stop - 1) // -WINDOW * -WINDOW
            seen_by_last = tl.maximum(tl.cdiv(newest, BLOCK_N) * BLOCK_N, start)
            first_end = tl.minimum(seen_by_last, stop)
            sums, odd_sums, most, weight = _attend(
                sums, odd_sums, most, weight, query, keys, values, key_scales, value_scales, table, at, start, first_end,
                oldest, stop, scale, HEAD_DIM, PAGE, KEY_BLOCK, KEY_TOKEN, VALUE_BLOCK, VALUE_TOKEN, KEY_SCALE_BLOCK,
                VALUE_SCALE_BLOCK, KEY_BITS, VALUE_BITS, HAS_ROW_SCALES, WINDOW, SOFTCAP, True, BLOCK_N, DIM, COMPUTE,
            )  # fmt: skip
        sums, odd_sums, most, weight = _attend(
            sums, odd_sums, most, weight, query, keys, values, key_scales, value_scales, table, at, seen_by_last, seen_by_first,
            oldest, stop, scale, HEAD_DIM, PAGE, KEY_BLOCK, KEY_TOKEN, VALUE_BLOCK, VALUE_TOKEN, KEY_SCALE_BLOCK,
            VALUE_SCALE_BLOCK, KEY_BITS, VALUE_BITS, HAS_ROW_SCALES, WINDOW, SOFTCAP, False, BLOCK_N, DIM, COMPUTE,
        )  # fmt: skip
        last_start = tl.maximum(seen_by_last, seen_by_first)
        sums, odd_sums, most, weight = _attend(
            sums, odd_sums, most, weight, query, keys, values, key_scales, value_scales, table, at, last_start, stop,
            oldest, stop, scale, HEAD_DIM, PAGE, KEY_BLOCK, KEY_TOKEN, VALUE_BLOCK, VALUE_TOKEN, KEY_SCALE_BLOCK,
            VALUE_SCALE_BLOCK, KEY_BITS, VALUE_BITS, HAS_ROW_SCALES, WINDOW, SOFTCAP, True, BLOCK_N, DIM, COMPUTE,
        )  # fmt: skip
    if VALUE_BITS == 8:
        sums = side_by_side(sums, odd_sums, BLOCK_M, DIM)
    if IS_CODED:
        sums *= value_scale
    result = finished(sums, most, weight, sinks, heads, is_row)
    tl.store(out + at_q, result.to(out.dtype.element_ty), mask=is_row[:, None] & in_head[None, :])


@triton.jit
def _attend(
    sums: tl.tensor,
    odd_sums: tl.tensor,
    most: tl.tensor,
    weight: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    table: tl.tensor,
    at: tl.tensor,  # [BLOCK_M] positions of the rows
    start: tl.tensor,  # multiples of BLOCK_N from here ..
    end: tl.tensor,  # .. to here
    oldest: tl.tensor,  # keys outside oldest .. stop are not read
    stop: tl.tensor,
    scale: tl.tensor,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    KEY_TOKEN: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    VALUE_TOKEN: tl.constexpr,
    KEY_SCALE_BLOCK: tl.constexpr,
    VALUE_SCALE_BLOCK: tl.constexpr,
    KEY_BITS: tl.constexpr,
    VALUE_BITS: tl.constexpr,
    HAS_ROW_SCALES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DIM: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Take the keys start .. end into the running softmax."""
    offs_n = tl.arange(0, BLOCK_N)
    # Block ids are fetched one tile ahead: an address must not wait for them.
    blocks = tl.load(table + (start + offs_n) // PAGE, mask=start + offs_n < stop, other=0)
    for begin in tl.range(start, end, BLOCK_N):
        key = begin + offs_n
        page, offset = blocks.to(tl.int64), key % PAGE
        blocks = tl.load(table + (key + BLOCK_N) // PAGE, mask=key + BLOCK_N < stop, other=0)
        is_live = (key >= oldest) & (key < stop)
        at_k = page * KEY_BLOCK + offset * KEY_TOKEN
        k = load_rows(keys, at_k, is_live, IS_MASKED, HEAD_DIM, DIM, COMPUTE, KEY_BITS)
        at_v = page * VALUE_BLOCK + offset * VALUE_TOKEN
        if VALUE_BITS == 8:
            v, odd_v = load_pairs(values, at_v, is_live, IS_MASKED, HEAD_DIM, DIM, COMPUTE)
        else:
            v = load_rows(values, at_v, is_live, IS_MASKED, HEAD_DIM, DIM, COMPUTE, VALUE_BITS)
        products = product(query, tl.trans(k), None)
        if HAS_ROW_SCALES:
            products *= load_scales(key_scales, page * KEY_SCALE_BLOCK + offset, is_live, IS_MASKED)
        scores = scaled_scores(products, scale, SOFTCAP)
        if IS_MASKED:
            is_seen = key[None, :] <= at[:, None]
            if WINDOW > 0:
                is_seen &= key[None, :] > at[:, None] - WINDOW
            elif WINDOW < 0:
                is_seen &= key[None, :] >= at[:, None] // -WINDOW * -WINDOW
            scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        if IS_MASKED and WINDOW != 0:
            higher = tl.where(higher == float("-inf"), -1e30, higher)  # a row whose window has not begun yet
        decay, weights = tl.exp2(most - higher), tl.exp2(scores - higher[:, None])
        most, weight = higher, weight * decay + tl.sum(weights, 1)
        if HAS_ROW_SCALES:
            weights *= VALUE_FACTOR * load_scales(value_scales, page * VALUE_SCALE_BLOCK + offset, is_live, IS_MASKED)
        sums = product(weights.to(COMPUTE), v, sums * decay[:, None])
        if VALUE_BITS == 8:
            odd_sums = product(weights.to(COMPUTE), odd_v, odd_sums * decay[:, None])
    return sums, odd_sums, most, weight
