"""Attention over latent rows in Triton: absorbed, for few queries, and with the keys and values of all heads made before.

Absorbed, every head of a token is a row of a tile, and so are the heads of the next token: a tile's rows attend over latent
rows as over one head of keys, whose first numbers are the values, so a row of the cache is read once for all of them. Keys
of a sequence are split over programs where few would work; a second launch joins the parts by log-sum-exp, each row by
itself (Flash-Decoding, Dao et al. 2023; online softmax, Milakov and Gimelshein 2018).

Where keys and values were made, a program owns a head and a tile of queries (FlashAttention-2, Dao 2023). Keys may come in
several passes, between which sums are kept.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samovar.attention.triton_tiles import LOG2E, product

MOST_SEQS = tl.constexpr(1024)
"""Sequences whose lengths a program adds up."""


@triton.jit
def sequence_of(
    tile: tl.tensor, first_rows: tl.tensor, first_seq: tl.tensor, stop_seq: tl.tensor, HEADS: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(sequence, its first row of queries, the tile's number in it). Sequence s has the tiles from (rows before it) *
    HEADS // BLOCK_M + (sequences before it) on: that is room enough."""
    base = tl.load(first_rows + first_seq)
    seq, highest = first_seq, stop_seq - 1
    while seq < highest:
        middle = (seq + highest + 1) // 2
        if (tl.load(first_rows + middle) - base) * HEADS // BLOCK_M + middle - first_seq <= tile:
            seq = middle
        else:
            highest = middle - 1
    first_row = tl.load(first_rows + seq)
    return seq, first_row, tile - (first_row - base) * HEADS // BLOCK_M - (seq - first_seq)


@triton.jit(do_not_specialize=["first_seq", "stop_seq", "splits", "table_stride", "count"])
def attend_rows(
    out: tl.tensor,  # [HEADS, count, RANK]
    partial: tl.tensor,  # [splits, HEADS, count, RANK] float32
    norms: tl.tensor,  # [splits, HEADS, count, 2] float32: largest score (base 2), sum of weights
    latent: tl.tensor,  # [HEADS, count, RANK]: queries as they meet latent numbers
    turned: tl.tensor,  # [count, HEADS, ROPE] with the strides given: queries as they meet the turned key
    cache: tl.tensor,  # [num_blocks, PAGE, RANK + ROPE]
    first_rows: tl.tensor,  # [num_seqs + 1]
    totals: tl.tensor,  # [num_seqs]
    table_rows: tl.tensor,  # [num_seqs]
    tables: tl.tensor,  # [.., table_stride]
    table_stride: tl.tensor,
    first_seq: tl.tensor,
    stop_seq: tl.tensor,
    splits: tl.tensor,
    count: tl.tensor,
    turned_token: tl.tensor,
    turned_head: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    PAGE: tl.constexpr,
    IS_ONE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """Grid (tiles, splits) for the sequences first_seq .. stop_seq, which have `count` queries in all; more tiles than
    needed do nothing. IS_ONE: one query each. IS_SPLIT: parts are stored, for `join_rows`."""
    tile, split = tl.program_id(0), tl.program_id(1)
    if IS_ONE:
        TILES: tl.constexpr = (HEADS + BLOCK_M - 1) // BLOCK_M
        seq = first_seq + tile // TILES
        first_row, number, new = tl.load(first_rows + seq), tile % TILES, 1
    else:
        seq, first_row, number = sequence_of(tile, first_rows, first_seq, stop_seq, HEADS, BLOCK_M)
        new = tl.load(first_rows + seq + 1) - first_row
    if number * BLOCK_M >= new * HEADS:
        return
    total = tl.load(totals + seq)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride

    offs_m, offs_n = number * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    offs_r, offs_t = tl.arange(0, RANK_BLOCK), tl.arange(0, ROPE_BLOCK)
    tokens, heads = offs_m // HEADS, offs_m % HEADS
    is_row, in_rank, in_rope = offs_m < new * HEADS, offs_r < RANK, offs_t < ROPE
    first_token = first_row - tl.load(first_rows + first_seq)
    row = heads.to(tl.int64) * count + first_token + tokens
    at_row = row[:, None] * RANK + offs_r[None, :]
    query = tl.load(latent + at_row, mask=is_row[:, None] & in_rank[None, :], other=0.0).to(COMPUTE)
    at_turned = (first_token + tokens).to(tl.int64) * turned_token + heads * turned_head
    turned_query = tl.load(
        turned + at_turned[:, None] + offs_t[None, :], mask=is_row[:, None] & in_rope[None, :], other=0.0
    ).to(COMPUTE)
    at = total - new + tokens
    last = tl.minimum(number * BLOCK_M + BLOCK_M - 1, new * HEADS - 1) // HEADS  # token of the last row

    part = tl.cdiv(tl.cdiv(total, splits), BLOCK_N) * BLOCK_N
    start = split * part
    stop = tl.minimum(start + part, total - new + last + 1)
    most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    weight = tl.zeros((BLOCK_M,), tl.float32)
    sums = tl.zeros((BLOCK_M, RANK_BLOCK), tl.float32)
    # Block ids are fetched one tile ahead: an address must not wait for them.
    blocks = tl.load(table + (start + offs_n) // PAGE, mask=start + offs_n < stop, other=0)
    for begin in tl.range(start, stop, BLOCK_N):
        key = begin + offs_n
        is_live = key < stop
        where = (blocks.to(tl.int64) * PAGE + key % PAGE) * (RANK + ROPE)
        blocks = tl.load(table + (key + BLOCK_N) // PAGE, mask=key + BLOCK_N < stop, other=0)
        k = tl.load(cache + where[:, None] + offs_r[None, :], mask=is_live[:, None] & in_rank[None, :], other=0.0).to(
            COMPUTE
        )
        t = tl.load(
            cache + where[:, None] + RANK + offs_t[None, :], mask=is_live[:, None] & in_rope[None, :], other=0.0
        ).to(COMPUTE)
        scores = product(turned_query, tl.trans(t), None)
        scores = product(query, tl.trans(k), scores) * (scale * LOG2E)
        is_seen = is_live[None, :] if IS_ONE else is_live[None, :] & (key[None, :] <= at[:, None])
        scores = tl.where(is_seen, scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        if not IS_ONE:
            higher = tl.where(higher == float("-inf"), -1e30, higher)  # a row before this part
        decay, weights = tl.exp2(most - higher), tl.exp2(scores - higher[:, None])
        most, weight = higher, weight * decay + tl.sum(weights, 1)
        sums = product(weights.to(COMPUTE), k, sums * decay[:, None])

    if IS_SPLIT:
        row += split.to(tl.int64) * HEADS * count
        tl.store(partial + row[:, None] * RANK + offs_r[None, :], sums, mask=is_row[:, None] & in_rank[None, :])
        tl.store(norms + row * 2, most, mask=is_row)
        tl.store(norms + row * 2 + 1, weight, mask=is_row)
    else:
        result = sums / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out + at_row, result.to(out.dtype.element_ty), mask=is_row[:, None] & in_rank[None, :])


@triton.jit(do_not_specialize=["splits", "rows"])
def join_rows(
    out: tl.tensor,  # [rows, RANK]
    partial: tl.tensor,  # [splits, rows, RANK] float32
    norms: tl.tensor,  # [splits, rows, 2] float32
    splits: tl.tensor,
    rows: tl.tensor,
    RANK: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
) -> None:
    """Grid (rows): the parts of one row, AT_ONCE under way; a row without keys gives zeros."""
    row = tl.program_id(0).to(tl.int64)
    offs_s, offs_r = tl.arange(0, MOST_SPLITS), tl.arange(0, RANK_BLOCK)
    highest = tl.max(tl.load(norms + (offs_s * rows + row) * 2, mask=offs_s < splits, other=float("-inf")), 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    sums, whole = tl.zeros((RANK_BLOCK,), tl.float32), 0.0
    for start in tl.range(0, splits, AT_ONCE):
        at = start + tl.arange(0, AT_ONCE)
        where = at.to(tl.int64) * rows + row
        most = tl.load(norms + where * 2, mask=at < splits, other=float("-inf"))
        weight = tl.load(norms + where * 2 + 1, mask=at < splits, other=0.0)
        mask = (at < splits)[:, None] & (offs_r < RANK)[None, :]
        part = tl.load(partial + where[:, None] * RANK + offs_r[None, :], mask=mask, other=0.0)
        share = tl.exp2(most - highest)
        whole += tl.sum(weight * share, 0)
        sums += tl.sum(part * share[:, None], 0)
    result = sums / tl.where(whole > 0, whole, 1.0)
    tl.store(out + row * RANK + offs_r, result.to(out.dtype.element_ty), mask=offs_r < RANK)


@triton.jit
def keys_before(totals: tl.tensor, first_seq: tl.tensor, seq: tl.tensor) -> tl.tensor:
    """Keys of the sequences first_seq .. seq."""
    at = first_seq + tl.arange(0, MOST_SEQS)
    return tl.sum(tl.load(totals + at, mask=at < seq, other=0), 0)


@triton.jit(do_not_specialize=["table_stride", "first_seq", "begin", "size"])
def gather_rows(
    gathered: tl.tensor,  # [keys, WIDTH]
    cache: tl.tensor,  # [num_blocks, PAGE, WIDTH]
    totals: tl.tensor,
    table_rows: tl.tensor,
    tables: tl.tensor,
    table_stride: tl.tensor,
    first_seq: tl.tensor,
    begin: tl.tensor,
    size: tl.tensor,
    WIDTH: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH_BLOCK: tl.constexpr,
) -> None:
    """Grid (tiles of BLOCK keys, sequences from first_seq on): rows of each sequence's keys begin .. begin + size, behind
    those of the sequences before it."""
    seq = first_seq + tl.program_id(1)
    total = tl.load(totals + seq)
    key = begin + tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_key = (key < total) & (key < begin + size)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    blocks = tl.load(table + key // PAGE, mask=is_key, other=0).to(tl.int64)
    column = tl.arange(0, WIDTH_BLOCK)[None, :]
    mask = is_key[:, None] & (column < WIDTH)
    x = tl.load(cache + ((blocks * PAGE + key % PAGE) * WIDTH)[:, None] + column, mask=mask)
    to = (keys_before(totals, first_seq, seq) + key - begin).to(tl.int64) * WIDTH
    tl.store(gathered + to[:, None] + column, x.to(gathered.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["first_seq", "stop_seq", "begin", "size"])
def attend_made(
    out: tl.tensor,  # [tokens, HEADS, VALUE]
    sums_kept: tl.tensor,  # [tokens, HEADS, VALUE] float32, or None
    norms_kept: tl.tensor,  # [tokens, HEADS, 2] float32, or None
    q: tl.tensor,  # [tokens, HEADS, NOPE + ROPE]
    made: tl.tensor,  # [keys, HEADS, NOPE + VALUE]
    gathered: tl.tensor,  # [keys, RANK + ROPE]
    first_rows: tl.tensor,
    totals: tl.tensor,
    first_seq: tl.tensor,
    stop_seq: tl.tensor,
    begin: tl.tensor,
    size: tl.tensor,
    scale: tl.tensor,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    ROPE: tl.constexpr,
    NOPE: tl.constexpr,
    VALUE: tl.constexpr,
    IS_FIRST: tl.constexpr,
    IS_LAST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ROPE_BLOCK: tl.constexpr,
    NOPE_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    """Grid (HEADS, tiles) for the sequences first_seq .. stop_seq; more tiles than needed do nothing. Keys begin .. begin +
    size of each were made; unless IS_FIRST there were others before, unless IS_LAST others follow."""
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest go first
    seq, first_row, number = sequence_of(tile, first_rows, first_seq, stop_seq, 1, BLOCK_M)
    new = tl.load(first_rows + seq + 1) - first_row
    if number * BLOCK_M >= new:
        return
    total = tl.load(totals + seq)
    offs_m = number * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_t, offs_k, offs_v = tl.arange(0, ROPE_BLOCK), tl.arange(0, NOPE_BLOCK), tl.arange(0, VALUE_BLOCK)
    is_row, in_rope, in_nope, in_value = offs_m < new, offs_t < ROPE, offs_k < NOPE, offs_v < VALUE
    row = (first_row + offs_m).to(tl.int64) * HEADS + head
    at_q = row[:, None] * (NOPE + ROPE)
    query = tl.load(q + at_q + offs_k[None, :], mask=is_row[:, None] & in_nope[None, :], other=0.0).to(COMPUTE)
    turned_query = tl.load(q + at_q + NOPE + offs_t[None, :], mask=is_row[:, None] & in_rope[None, :], other=0.0).to(
        COMPUTE
    )
    at_out, mask_out = row[:, None] * VALUE + offs_v[None, :], is_row[:, None] & in_value[None, :]
    if IS_FIRST:
        most = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        weight = tl.zeros((BLOCK_M,), tl.float32)
        sums = tl.zeros((BLOCK_M, VALUE_BLOCK), tl.float32)
    else:
        most = tl.load(norms_kept + row * 2, mask=is_row, other=0.0)
        weight = tl.load(norms_kept + row * 2 + 1, mask=is_row, other=0.0)
        sums = tl.load(sums_kept + at_out, mask=mask_out, other=0.0)

    at = total - new + offs_m
    first_at = total - new + number * BLOCK_M
    end = tl.minimum(tl.minimum(first_at + BLOCK_M, total), begin + size)
    whole = begin + tl.maximum(tl.minimum(first_at + 1, end) - begin, 0) // BLOCK_N * BLOCK_N  # tiles that all rows see
    base = keys_before(totals, first_seq, seq) - begin
    gathered += RANK
    sums, most, weight = take_keys(
        sums, most, weight, query, turned_query, made, gathered, base, head, at, begin, whole, end, scale,
        HEADS, RANK, ROPE, NOPE, VALUE, False, BLOCK_N, ROPE_BLOCK, NOPE_BLOCK, VALUE_BLOCK, COMPUTE,
    )  # fmt: skip
    sums, most, weight = take_keys(
        sums, most, weight, query, turned_query, made, gathered, base, head, at, whole, end, end, scale,
        HEADS, RANK, ROPE, NOPE, VALUE, True, BLOCK_N, ROPE_BLOCK, NOPE_BLOCK, VALUE_BLOCK, COMPUTE,
    )  # fmt: skip
    if IS_LAST:
        result = sums / tl.where(weight > 0, weight, 1.0)[:, None]
        tl.store(out + at_out, result.to(out.dtype.element_ty), mask=mask_out)
    else:
        tl.store(norms_kept + row * 2, most, mask=is_row)
        tl.store(norms_kept + row * 2 + 1, weight, mask=is_row)
        tl.store(sums_kept + at_out, sums, mask=mask_out)


@triton.jit
def take_keys(
    sums: tl.tensor, most: tl.tensor, weight: tl.tensor, query: tl.tensor, turned_query: tl.tensor, made: tl.tensor,
    turned: tl.tensor, base: tl.tensor, head: tl.tensor, at: tl.tensor, start: tl.tensor, stop: tl.tensor,
    end: tl.tensor, scale: tl.tensor, HEADS: tl.constexpr, RANK: tl.constexpr, ROPE: tl.constexpr, NOPE: tl.constexpr,
    VALUE: tl.constexpr, IS_MASKED: tl.constexpr, BLOCK_N: tl.constexpr, ROPE_BLOCK: tl.constexpr,
    NOPE_BLOCK: tl.constexpr, VALUE_BLOCK: tl.constexpr, COMPUTE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Take the keys start .. stop, none from `end` on, into the running softmax; key k is row base + k."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_t, offs_k, offs_v = tl.arange(0, ROPE_BLOCK), tl.arange(0, NOPE_BLOCK), tl.arange(0, VALUE_BLOCK)
    for first in tl.range(start, stop, BLOCK_N):
        key = first + offs_n
        row = (base + key).to(tl.int64)
        at_made = (row * HEADS + head) * (NOPE + VALUE)
        in_nope, in_value, in_rope = (offs_k < NOPE)[None, :], (offs_v < VALUE)[None, :], (offs_t < ROPE)[None, :]
        if IS_MASKED:
            is_key = (key < end)[:, None]
            in_nope, in_value, in_rope = in_nope & is_key, in_value & is_key, in_rope & is_key
        k = tl.load(made + at_made[:, None] + offs_k[None, :], mask=in_nope, other=0.0).to(COMPUTE)
        v = tl.load(made + at_made[:, None] + NOPE + offs_v[None, :], mask=in_value, other=0.0).to(COMPUTE)
        t = tl.load(turned + row[:, None] * (RANK + ROPE) + offs_t[None, :], mask=in_rope, other=0.0).to(COMPUTE)
        scores = product(turned_query, tl.trans(t), None)
        scores = product(query, tl.trans(k), scores) * (scale * LOG2E)
        if IS_MASKED:
            scores = tl.where((key[None, :] <= at[:, None]) & (key < end)[None, :], scores, float("-inf"))
        higher = tl.maximum(most, tl.max(scores, 1))
        if IS_MASKED:
            higher = tl.where(higher == float("-inf"), -1e30, higher)  # a row before these keys
        decay, weights = tl.exp2(most - higher), tl.exp2(scores - higher[:, None])
        most, weight = higher, weight * decay + tl.sum(weights, 1)
        sums = product(weights.to(COMPUTE), v, sums * decay[:, None])
    return sums, most, weight
