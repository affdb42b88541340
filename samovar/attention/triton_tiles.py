"""What decode and prefill share: rows of the cache, products, scores, the end of an online softmax. Scores are in base 2.

Rows of codes become float16, which holds 8 bits of either kind exactly; their scales never touch them. Those of keys are
multiplied into scores, those of values into weights (scales of rows) or results (scales of heads). Queries are divided by
their largest magnitude first: bfloat16 has numbers that float16 has not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from samovar.kernels.write_kv.triton import level

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter multiplies matrices of bfloat16 as if they were integers: it gets float32."""
VALUE_FACTOR = tl.constexpr(16.0)
"""Weights times scales of values are this much larger in float16, where small numbers are coarse: scales from 1e-5 to
4e3 are served."""
INT8_TO_FLOAT16 = tl.constexpr("""{
    .reg .b32 biased, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 biased, $2, 0x80808080;
    prmt.b32 $0, biased, 0x64646464, 0x4140;
    prmt.b32 $1, biased, 0x64646464, 0x4342;
    sub.rn.f16x2 $0, $0, bias;
    sub.rn.f16x2 $1, $1, bias;
}""")
"""Four at a time: a byte below the exponent of 1024 is 1024 and that byte."""
INT8_PAIRS = tl.constexpr("""{
    .reg .b32 biased, bias;
    mov.b32 bias, 0x64806480;
    xor.b32 biased, $2, 0x80808080;
    prmt.b32 $0, biased, 0x64646464, 0x4240;
    prmt.b32 $1, biased, 0x64646464, 0x4341;
    sub.rn.f16x2 $0, $0, bias;
    sub.rn.f16x2 $1, $1, bias;
}""")
E4M3_PAIRS = tl.constexpr("""{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, $2, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
E5M2_PAIRS = tl.constexpr("""{
    prmt.b32 $0, $2, 0, 0x2404;
    prmt.b32 $1, $2, 0, 0x3414;
}""")
"""Two pairs of bytes -> the first of each, the second of each. Matrix instructions want values of two neighbouring keys in
a register; memory has two neighbouring values of one key. There is an instruction that exchanges elements of 16 bits, and
none for bytes: so pairs of bytes are exchanged, and taken apart here."""


@triton.jit
def load_rows(
    start: tl.tensor, at: tl.tensor, is_row: tl.tensor, IS_MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, COMPUTE: tl.constexpr, BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Numbers or codes [rows, DIM] of the rows at elements `at` [rows] from `start`; with IS_MASKED only where `is_row`.
    Packed codes, which have less than 8 BITS, become the levels that they stand for."""
    if BITS < 8:
        return load_levels(start, at, is_row, IS_MASKED, HEAD_DIM, DIM, COMPUTE, BITS)
    else:
        x = load_columns(start, at, is_row, IS_MASKED, HEAD_DIM, DIM)
        if x.dtype == tl.int8 and tl.float16 == COMPUTE and not INTERPRETED:
            x = tl.inline_asm_elementwise(INT8_TO_FLOAT16, "=r,=r,r", [x], dtype=tl.float16, is_pure=True, pack=4)
        return x.to(COMPUTE)


@triton.jit
def load_columns(
    start: tl.tensor, at: tl.tensor, is_row: tl.tensor, IS_MASKED: tl.constexpr, COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """COLUMNS elements of each row, [rows, PADDED]."""
    columns = tl.arange(0, PADDED)
    mask = (columns < COLUMNS)[None, :]
    if IS_MASKED:
        mask = is_row[:, None] & mask
    return tl.load(start + at[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def load_levels(
    start: tl.tensor, at: tl.tensor, is_row: tl.tensor, IS_MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, COMPUTE: tl.constexpr, BITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """`load_rows` of packed codes."""
    if BITS == 4:
        x = load_columns(start, at, is_row, IS_MASKED, HEAD_DIM // 2, DIM // 2)
        codes = tl.join(x & 15, x >> 4)
    else:
        x = load_columns(start, at, is_row, IS_MASKED, HEAD_DIM // 4, DIM // 4)
        codes = tl.join(tl.join(x & 3, (x >> 4) & 3), tl.join((x >> 2) & 3, x >> 6))
    codes = tl.reshape(codes, (at.shape[0], DIM))
    if BITS == 3:
        x = load_columns(start + HEAD_DIM // 4, at, is_row, IS_MASKED, HEAD_DIM // 8, DIM // 8)
        even = tl.join(tl.join(x & 1, (x >> 4) & 1), tl.join((x >> 2) & 1, (x >> 6) & 1))
        odd = tl.join(tl.join((x >> 1) & 1, (x >> 5) & 1), tl.join((x >> 3) & 1, x >> 7))
        codes |= tl.reshape(tl.join(even, odd), (at.shape[0], DIM)) << 2
    MIDDLE: tl.constexpr = (2**BITS - 1) / 2
    if tl.float16 == COMPUTE:
        # A code below the exponent of 1024 is 1024 and that code.
        u = (codes.to(tl.int16) | 0x6400).to(tl.float16, bitcast=True) - 1024.0
    else:
        u = codes.to(COMPUTE)
    return level(u - MIDDLE, BITS).to(COMPUTE)


@triton.jit
def load_pairs(
    start: tl.tensor, at: tl.tensor, is_row: tl.tensor, IS_MASKED: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, COMPUTE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """As `load_rows` for codes of 8 bits, apart: every other number from the first on, from the second on, [rows, DIM / 2]."""
    offs_d = tl.arange(0, DIM // 2)
    mask = (offs_d < HEAD_DIM // 2)[None, :]
    if IS_MASKED:
        mask = is_row[:, None] & mask
    code: tl.constexpr = start.dtype.element_ty
    pairs = start.to(tl.pointer_type(tl.int16), bitcast=True)
    x = tl.load(pairs + at[:, None] // 2 + offs_d[None, :], mask=mask, other=0)
    if INTERPRETED:
        even, odd = (
            (x & 0xFF).to(tl.uint8).to(code, bitcast=True),
            ((x >> 8) & 0xFF).to(tl.uint8).to(code, bitcast=True),
        )
    else:
        ASM: tl.constexpr = INT8_PAIRS if code == tl.int8 else E4M3_PAIRS if code == tl.float8e4nv else E5M2_PAIRS
        even, odd = tl.inline_asm_elementwise(ASM, "=r,=r,r", [x], dtype=(tl.float16, tl.float16), is_pure=True, pack=2)
    return even.to(COMPUTE), odd.to(COMPUTE)


@triton.jit
def side_by_side(even: tl.tensor, odd: tl.tensor, ROWS: tl.constexpr, DIM: tl.constexpr) -> tl.tensor:
    """[ROWS, DIM] from every other column."""
    return tl.reshape(tl.join(even, odd), (ROWS, DIM))


@triton.jit
def load_scales(start: tl.tensor, at: tl.tensor, is_row: tl.tensor, IS_MASKED: tl.constexpr) -> tl.tensor:
    """Scales [1, rows] in float32."""
    if IS_MASKED:
        return tl.load(start + at, mask=is_row, other=0.0).to(tl.float32)[None, :]
    else:
        return tl.load(start + at).to(tl.float32)[None, :]


@triton.jit
def unit_rows(query: tl.tensor, COMPUTE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Rows divided by their largest magnitude, and that [rows, 1]."""
    query = query.to(tl.float32)
    size = tl.max(tl.abs(query), 1)[:, None]
    size = tl.where(size > 0, size, 1.0)
    return (query / size).to(COMPUTE), size


@triton.jit
def product(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a b, in float32; `total` may be None."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def scaled_scores(products: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """q.k -> score * log2(e), with the soft cap if there is one (0: none). `scale` is in natural units."""
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (e^2x + 1)
        powers = tl.exp2(products * (scale * (2 * LOG2E / SOFTCAP)))
        return SOFTCAP * LOG2E - (2 * SOFTCAP * LOG2E) / (powers + 1)
    return products * (scale * LOG2E)


@triton.jit
def finished(
    sums: tl.tensor, most: tl.tensor, weight: tl.tensor, sinks: tl.tensor, heads: tl.tensor, is_head: tl.tensor
) -> tl.tensor:
    """Weighted values [rows, dim] from sums, largest scores and sums of weights; a row without keys gives zeros.

    `sinks` (or None) are read at `heads` [rows] where `is_head`.
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=is_head, other=float("-inf")) * LOG2E
        higher = tl.maximum(most, sink)
        higher = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp2(most - higher) + tl.exp2(sink - higher)
        sums = sums * tl.exp2(most - higher)[:, None]
    return sums / tl.where(weight > 0, weight, 1.0)[:, None]
