"""Packed codes to tiles of bfloat16 in registers, about 2.5 instructions for two weights; and whole matrices for cuBLAS.

`decode_tile` makes its tile in the very registers from which a matrix instruction reads it: loads of 16 bytes a thread,
shifts and masks, one multiplication for two weights, and no way through shared memory. The sixteen numbers of E2M1 are
bfloat16 as they are, but for a power of two (0.5 is a denormal number there), and times an E4M3 scale they are exact.
Integers come out of 128 + code, whose last four bits are the code (Kim et al., 2022, do so with float16); of eight bits,
the last seven are, less 128 or 256. E4M3 is treated like E2M1. Other tables are looked up byte by byte.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from samovar.kernels.coded_weights import BRICK_ROWS, FP4, KINDS, NF4, Kind, shape_of
from samovar.kernels.triton_launch import cdiv, launch

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))

_HEAD = (
    "{ .reg .b32 s0, s1, s2, s3, z0, z2, u, v, m, one; .reg .b16 l, h; mov.b32 m, 0x80008000; mov.b32 one, 0x3F803F80; "
)


def _twice(source: str, low: str, high: str) -> str:
    """The halves of a word, each two times: the multiplication reads them so, and no instruction is spent."""
    return f"mov.b32 {{l, h}}, {source}; mov.b32 {low}, {{l, l}}; mov.b32 {high}, {{h, h}}; "


def _scales(kind: Kind, word: str) -> str:
    """Two times the bfloat16 scale of each 16 inputs, s0 to s3 (of eight bits s0 and s1), from a word."""
    if kind.bits == 8:
        return _twice(word, "s0", "s1")
    if kind.has_small_scale:
        pairs = (("0x4140", "s0", "s1"), ("0x4342", "s2", "s3"))
        return "".join(
            f"prmt.b32 u, {word}, 0, {selector}; mad.lo.u32 u, u, 16, 0x70007000; {_twice('u', low, high)}"
            for selector, low, high in pairs
        )
    if kind.group == 32:
        return _twice(word, "s0", "s2") + "mov.b32 s1, s0; mov.b32 s3, s2; "
    return _twice(word, "s0", "z0") + "mov.b32 s1, s0; mov.b32 s2, s0; mov.b32 s3, s0; "


def _e2m1(word: str, outputs: tuple[str, str, str, str], scales: tuple[str, str]) -> str:
    low, high = scales
    a, b, c, d = outputs
    mask = "0x81C081C0"
    return (
        f"and.b32 u, {word}, {mask}; fma.rn.bf16x2 {a}, u, {low}, m; "
        f"shl.b32 u, {word}, 3; and.b32 u, u, {mask}; fma.rn.bf16x2 {b}, u, {low}, m; "
        f"shl.b32 u, {word}, 6; and.b32 u, u, {mask}; fma.rn.bf16x2 {c}, u, {high}, m; "
        f"shl.b32 u, {word}, 1; and.b32 u, u, 0x80008000; shr.b32 v, {word}, 3; lop3.b32 u, v, 0x01800180, u, 0xEA; "
        f"shr.b32 v, {word}, 7; lop3.b32 u, v, 0x00400040, u, 0xEA; fma.rn.bf16x2 {d}, u, {high}, m; "
    )


def _int4(word: str, outputs: tuple[str, str, str, str], scales: tuple[str, str], zeros: tuple[str, str]) -> str:
    """(128 + code) + -(128 + zero), times the scale."""
    text = "mov.b32 v, 0x43004300; "
    for place, target in enumerate(outputs):
        scale, zero = scales[place >> 1], zeros[place >> 1]
        source = word
        if place:
            text += f"shr.b32 u, {word}, {4 * place}; "
            source = "u"
        text += f"lop3.b32 u, {source}, 0x000F000F, v, 0xEA; fma.rn.bf16x2 u, u, one, {zero}; "
        text += f"fma.rn.bf16x2 {target}, u, {scale}, m; "
    return text


def _int8(word: str, outputs: tuple[str, str], scale: str) -> str:
    """128 + the last seven bits, less 128 or 256, times the scale."""
    text = "mov.b32 v, 0x43004300; mov.b32 z0, 0xBF80BF80; "
    for place, target in enumerate(outputs):
        source = word
        if place:
            text += f"shr.b32 z2, {word}, 8; "
            source = "z2"
        text += f"lop3.b32 u, {source}, 0x007F007F, v, 0xEA; lop3.b32 s3, {source}, 0x00800080, v, 0xEA; "
        text += f"fma.rn.bf16x2 u, s3, z0, u; fma.rn.bf16x2 {target}, u, {scale}, m; "
    return text


def _e4m3(word: str, outputs: tuple[str, str], scale: str) -> str:
    """Sign, exponent and mantissa stand where bfloat16 has them, but for a power of two; of second codes in three pieces."""
    first, second = outputs
    return (
        f"and.b32 u, {word}, 0x87F087F0; fma.rn.bf16x2 {first}, u, {scale}, m; "
        f"shl.b32 u, {word}, 1; and.b32 u, u, 0x80008000; shr.b32 v, {word}, 3; lop3.b32 u, v, 0x07000700, u, 0xEA; "
        f"shl.b32 v, {word}, 4; lop3.b32 u, v, 0x00F000F0, u, 0xEA; fma.rn.bf16x2 {second}, u, {scale}, m; "
    )


def _bytes_of(table: tuple[float, ...], shift: int) -> list[str]:
    """One byte of each of 16 bfloat16 numbers, as four words."""
    bits = (torch.tensor(table).to(torch.bfloat16).view(torch.int16).int() >> shift & 255).tolist()
    return [f"0x{sum(bits[4 * i + j] << (8 * j) for j in range(4)):08X}" for i in range(4)]


def _looked_up(word: str, outputs: tuple[str, str, str, str], scale: str, table: tuple[float, ...]) -> str:
    """Four codes at a time: both bytes of their numbers out of either half of the table, of which one is kept."""
    text = ""
    for place in (0, 2):
        source = word
        if place:
            text += f"shr.b32 z0, {word}, 16; "
            source = "z0"
        text += f"and.b32 v, {source}, 0x7777; shr.b32 u, {source}, 3; and.b32 u, u, 0x1111; "
        text += "mov.b32 z2, 0x0000FF00; prmt.b32 u, z2, 0, u; "
        for shift, found in ((0, "s1"), (8, "s2")):
            halves = _bytes_of(table, shift)
            text += f"mov.b32 s3, {halves[0]}; mov.b32 z2, {halves[1]}; prmt.b32 {found}, s3, z2, v; "
            text += f"mov.b32 s3, {halves[2]}; mov.b32 z2, {halves[3]}; prmt.b32 s3, s3, z2, v; "
            text += f"lop3.b32 {found}, u, s3, {found}, 0xCA; "
        for target, selector in zip(outputs[place : place + 2], ("0x5140", "0x7362"), strict=True):
            text += f"prmt.b32 u, s1, s2, {selector}; fma.rn.bf16x2 {target}, u, {scale}, m; "
    return text


def _program(name: str) -> str:
    """PTX for two words of a row and its scale word, and one of zero points if there is one: 16 weights as eight pairs $0
    to $7, those of inputs 16j + 8h; of eight bits, 8 weights as $0 to $3. Of each scale word there is a copy behind it."""
    kind = KINDS[name]
    if kind.bits == 8:
        made = _int8 if kind.code == "int8" else _e4m3
        text = _HEAD + _scales(kind, "$6")
        return text + made("$4", ("$0", "$1"), "s0") + made("$5", ("$2", "$3"), "s1") + "}"
    text = _HEAD + _scales(kind, "$10")
    first, second = ("$0", "$1", "$2", "$3"), ("$4", "$5", "$6", "$7")
    if kind.code == "e2m1":
        return text + _e2m1("$8", first, ("s0", "s1")) + _e2m1("$9", second, ("s2", "s3")) + "}"
    if kind.code != "int4":
        return text + "".join(_looked_up(w, o, "s0", kind.values) for w, o in (("$8", first), ("$9", second))) + "}"
    if not kind.has_zero:
        text += "mov.b32 z0, 0xC308C308; mov.b32 z2, z0; "
    elif kind.group == 64:
        text += "mov.b32 z2, z0; "
    else:
        text += _twice("$12", "z0", "z2")
    return text + _int4("$8", first, ("s0", "s1"), ("z0", "z0")) + _int4("$9", second, ("s2", "s3"), ("z2", "z2")) + "}"


_OUTPUTS, _FEW_OUTPUTS = ",".join(["=&r"] * 8), ",".join(["=&r"] * 4)
PROGRAMS = {name: _program(name) for name in KINDS}
E2M1_16, E2M1_32 = tl.constexpr(PROGRAMS["e2m1_16"]), tl.constexpr(PROGRAMS["e2m1_32"])
INT4_32, INT4_64 = tl.constexpr(PROGRAMS["int4_32"]), tl.constexpr(PROGRAMS["int4_64"])
INT4_32_ZERO, INT4_64_ZERO = tl.constexpr(PROGRAMS["int4_32_zero"]), tl.constexpr(PROGRAMS["int4_64_zero"])
NF4_64, FP4_64 = tl.constexpr(PROGRAMS["nf4_64"]), tl.constexpr(PROGRAMS["fp4_64"])
INT8_16, E4M3_16 = tl.constexpr(PROGRAMS["int8_16"]), tl.constexpr(PROGRAMS["e4m3_16"])
FOUR, SIX = tl.constexpr(_OUTPUTS + ",r,r,r,r"), tl.constexpr(_OUTPUTS + ",r,r,r,r,r,r")
FOUR_OF_BYTES = tl.constexpr(_FEW_OUTPUTS + ",r,r,r,r")
PAIRS, FEW_PAIRS = tl.constexpr((tl.bfloat16,) * 8), tl.constexpr((tl.bfloat16,) * 4)
NF4_NUMBERS, FP4_NUMBERS = (
    tl.constexpr(tuple(torch.tensor(table).to(torch.bfloat16).tolist())) for table in (NF4, FP4)
)


@triton.jit
def _spread(words: tl.tensor, KT: tl.constexpr, NT: tl.constexpr) -> tl.tensor:
    """One word for each row of a brick [KT, NT, 16] -> one for each word of codes [KT, NT, 128]."""
    words = tl.reshape(words, (KT, NT, 8, 1, 2, 1))
    return tl.reshape(tl.broadcast_to(words, (KT, NT, 8, 4, 2, 2)), (KT, NT, 128))


@triton.jit
def _run_program(
    words: tl.tensor, scales: tl.tensor, zeros: tl.tensor, KIND: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr
) -> tl.tensor:
    """Eight tensors bfloat16 [KT, NT, 128]; of eight bits four."""
    s = _spread(scales, KT, NT)
    if KIND == "int4_32_zero":
        z = _spread(zeros, KT, NT)
        return tl.inline_asm_elementwise(INT4_32_ZERO, SIX, [words, s, z], dtype=PAIRS, is_pure=True, pack=2)
    elif KIND == "e2m1_16":
        return tl.inline_asm_elementwise(E2M1_16, FOUR, [words, s], dtype=PAIRS, is_pure=True, pack=2)
    elif KIND == "e2m1_32":
        return tl.inline_asm_elementwise(E2M1_32, FOUR, [words, s], dtype=PAIRS, is_pure=True, pack=2)
    elif KIND == "int4_32":
        return tl.inline_asm_elementwise(INT4_32, FOUR, [words, s], dtype=PAIRS, is_pure=True, pack=2)
    elif KIND == "int4_64":
        return tl.inline_asm_elementwise(INT4_64, FOUR, [words, s], dtype=PAIRS, is_pure=True, pack=2)
    elif KIND == "nf4_64":
        return tl.inline_asm_elementwise(NF4_64, FOUR, [words, s], dtype=PAIRS, is_pure=True, pack=2)
    elif KIND == "fp4_64":
        return tl.inline_asm_elementwise(FP4_64, FOUR, [words, s], dtype=PAIRS, is_pure=True, pack=2)
    elif KIND == "int8_16":
        return tl.inline_asm_elementwise(INT8_16, FOUR_OF_BYTES, [words, s], dtype=FEW_PAIRS, is_pure=True, pack=2)
    elif KIND == "e4m3_16":
        return tl.inline_asm_elementwise(E4M3_16, FOUR_OF_BYTES, [words, s], dtype=FEW_PAIRS, is_pure=True, pack=2)
    else:
        tl.static_assert(KIND == "int4_64_zero")
        return tl.inline_asm_elementwise(INT4_64_ZERO, FOUR, [words, s], dtype=PAIRS, is_pure=True, pack=2)


@triton.jit
def _bfloat16_of(bits: tl.tensor) -> tl.tensor:
    """The number whose bfloat16 bits are the lower 16, as float32."""
    return (bits << 16).to(tl.float32, bitcast=True)


@triton.jit
def _plain_scale(
    scales: tl.tensor, zeros: tl.tensor, J: tl.constexpr, KIND: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """(scale, minus (128 + zero point)) of inputs 16 J and on, from scale words."""
    minus = tl.full(scales.shape, -136.0, tl.float32)
    if KIND == "e2m1_16":
        scale = _bfloat16_of((((scales >> (8 * J)) & 0xFF) << 4) | 0x7000)
    elif KIND == "int8_16" or KIND == "e4m3_16":
        scale = _bfloat16_of(scales >> (16 * J))
    elif KIND == "int4_64" or KIND == "int4_64_zero" or KIND == "nf4_64" or KIND == "fp4_64":
        scale = _bfloat16_of(scales)
        if KIND == "int4_64_zero":
            minus = _bfloat16_of(scales >> 16)
    else:
        scale = _bfloat16_of(scales >> (16 * (J // 2)))
        if KIND == "int4_32_zero":
            minus = _bfloat16_of(zeros >> (16 * (J // 2)))
    return scale, minus


@triton.jit
def _plain_value(words: tl.tensor, PLACE: tl.constexpr, P: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """float32 of one code of each word: E2M1 times 2 ** -126, E4M3 times 2 ** -120, 128 + an integer of four bits."""
    half = (words >> (16 * P)) & 0xFFFF
    if KIND == "e2m1_16" or KIND == "e2m1_32":
        if PLACE == 3:
            bits = ((half << 1) & 0x8000) | ((half >> 3) & 0x0180) | ((half >> 7) & 0x0040)
        else:
            bits = (half << (3 * PLACE)) & 0x81C0
        value = _bfloat16_of(bits)
    elif KIND == "e4m3_16":
        if PLACE == 0:
            bits = half & 0x87F0
        else:
            bits = ((half << 1) & 0x8000) | ((half >> 3) & 0x0700) | ((half << 4) & 0x00F0)
        value = _bfloat16_of(bits)
    elif KIND == "int8_16":
        value = ((half << (24 - 8 * PLACE)) >> 24).to(tl.float32)
    elif KIND == "nf4_64" or KIND == "fp4_64":
        code = (words >> (8 * PLACE + 4 * P)) & 15
        value = tl.zeros(words.shape, tl.float32)
        for n in tl.static_range(16):
            if KIND == "nf4_64":
                value = tl.where(code == n, NF4_NUMBERS[n], value)
            else:
                value = tl.where(code == n, FP4_NUMBERS[n], value)
    else:
        value = ((half >> (4 * PLACE)) & 15).to(tl.float32) + 128.0
    return value


@triton.jit
def _plain_pair(word: tl.tensor, scales: tl.tensor, zeros: tl.tensor, N: tl.constexpr, KIND: tl.constexpr) -> tl.tensor:
    """What output N of `_run_program` is, from the word that holds it."""
    PLACES: tl.constexpr = 2 if KIND == "int8_16" or KIND == "e4m3_16" else 4
    scale, minus = _plain_scale(scales, zeros, N // 2, KIND)
    low, high = _plain_value(word, N % PLACES, 0, KIND), _plain_value(word, N % PLACES, 1, KIND)
    if KIND == "int4_32" or KIND == "int4_64" or KIND == "int4_32_zero" or KIND == "int4_64_zero":
        low, high = low + minus, high + minus
    return tl.join((low * scale).to(tl.bfloat16), (high * scale).to(tl.bfloat16))


@triton.jit
def _run_plainly(
    words: tl.tensor, scales: tl.tensor, zeros: tl.tensor, KIND: tl.constexpr, KT: tl.constexpr, NT: tl.constexpr
) -> tl.tensor:
    """`_run_program` without PTX."""
    a, b = tl.split(tl.reshape(words, (KT, NT, 64, 2)))
    s, _ = tl.split(tl.reshape(_spread(scales, KT, NT), (KT, NT, 64, 2)))
    z, _ = tl.split(tl.reshape(_spread(zeros, KT, NT), (KT, NT, 64, 2)))
    if KIND == "int8_16" or KIND == "e4m3_16":
        return (
            tl.reshape(_plain_pair(a, s, z, 0, KIND), (KT, NT, 128)),
            tl.reshape(_plain_pair(a, s, z, 1, KIND), (KT, NT, 128)),
            tl.reshape(_plain_pair(b, s, z, 2, KIND), (KT, NT, 128)),
            tl.reshape(_plain_pair(b, s, z, 3, KIND), (KT, NT, 128)),
        )
    return (
        tl.reshape(_plain_pair(a, s, z, 0, KIND), (KT, NT, 128)),
        tl.reshape(_plain_pair(a, s, z, 1, KIND), (KT, NT, 128)),
        tl.reshape(_plain_pair(a, s, z, 2, KIND), (KT, NT, 128)),
        tl.reshape(_plain_pair(a, s, z, 3, KIND), (KT, NT, 128)),
        tl.reshape(_plain_pair(b, s, z, 4, KIND), (KT, NT, 128)),
        tl.reshape(_plain_pair(b, s, z, 5, KIND), (KT, NT, 128)),
        tl.reshape(_plain_pair(b, s, z, 6, KIND), (KT, NT, 128)),
        tl.reshape(_plain_pair(b, s, z, 7, KIND), (KT, NT, 128)),
    )


@triton.jit
def decode_tile(
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    KIND: tl.constexpr,
    KT: tl.constexpr,
    NT: tl.constexpr,
    WIDE: tl.constexpr = False,
) -> tl.tensor:
    """Words of codes [KT, NT, 128], scales and zero points [KT, NT, 16] -> bfloat16 [16 NT, 64 KT] (of eight bits
    32 KT), times 2 ** `descale`.

    With WIDE inputs are in the order of `wide_columns`.
    """
    if INTERPRETED:
        pairs = _run_plainly(words, scales, zeros, KIND, KT, NT)
    else:
        pairs = _run_program(words, scales, zeros, KIND, KT, NT)
    if KIND == "int8_16" or KIND == "e4m3_16":
        # Dimensions to the right: input / 16, input / 8 % 2.
        tile = tl.join(tl.join(pairs[0], pairs[2]), tl.join(pairs[1], pairs[3]))
        tile = tl.reshape(tile, (KT, NT, 8, 4, 2, 2, 2, 2))
        if WIDE:
            tile = tl.permute(tile, (1, 4, 2, 0, 6, 3, 7, 5))
        else:
            tile = tl.permute(tile, (1, 4, 2, 0, 6, 7, 3, 5))
        return tl.reshape(tile, (NT * 16, KT * 32))
    else:
        # Dimensions to the right: input / 32, input / 16 % 2, input / 8 % 2.
        even = tl.join(tl.join(pairs[0], pairs[4]), tl.join(pairs[2], pairs[6]))
        odd = tl.join(tl.join(pairs[1], pairs[5]), tl.join(pairs[3], pairs[7]))
        tile = tl.reshape(tl.join(even, odd), (KT, NT, 8, 4, 2, 2, 2, 2, 2))
        if WIDE:
            tile = tl.permute(tile, (1, 4, 2, 0, 6, 7, 3, 8, 5))
        else:
            tile = tl.permute(tile, (1, 4, 2, 0, 6, 7, 8, 3, 5))
        return tl.reshape(tile, (NT * 16, KT * 64))


@triton.jit
def wide_columns(BK: tl.constexpr) -> tl.tensor:
    """[1, BK]: in each 16 inputs, 2t + 8h + p at 4t + 2h + p.

    Where a matrix instruction has both operands in registers, Triton gives each thread four inputs in a row. Then the
    activations are brought in the weights' order, not the weights in theirs.
    """
    at = tl.arange(0, BK)[None, :]
    return tl.max_contiguous(tl.multiple_of((at & ~14) | ((at & 2) << 2) | ((at & 12) >> 1), (1, 2)), (1, 2))


@triton.jit
def zeros_of(at_scale: tl.tensor, scales: tl.tensor, WORDS: tl.constexpr) -> tl.tensor:
    """Zero points, behind the scales to which `at_scale` points, where they have words of their own."""
    if WORDS == 2:
        return tl.load(at_scale + 16)
    else:
        return scales


@triton.jit
def bricks_at(
    codes: tl.tensor,
    first: tl.tensor,
    NB: tl.tensor,
    KB: tl.tensor,
    KT: tl.constexpr,
    NT: tl.constexpr,
    W: tl.constexpr,
    STRIDE: tl.constexpr,
) -> tl.tensor:
    """Pointers [KT, NT, W] to the first W of STRIDE words of each brick of NT rows of bricks from `first` on (beyond the
    last: the last)."""
    rows = tl.minimum(first + tl.arange(0, NT), NB - 1).to(tl.int64)[None, :, None] * KB
    return codes + (rows + tl.arange(0, KT)[:, None, None]) * STRIDE + tl.arange(0, W)[None, None, :]


@triton.jit
def dequantize_kernel(
    codes: tl.tensor,
    scale: tl.tensor,
    row_scale: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    rows: tl.tensor,
    K: tl.tensor,
    NB: tl.tensor,
    KB: tl.tensor,
    KIND: tl.constexpr,
    WORDS: tl.constexpr,
    DESCALE: tl.constexpr,
    EVEN_K: tl.constexpr,
    KT: tl.constexpr,
    NT: tl.constexpr,
    BRICK: tl.constexpr,
) -> None:
    """out [rows, K] = the weights from row `first` on, a multiple of 16; a program makes NT x KT bricks."""
    brick, k = first // 16 + tl.program_id(0) * NT, tl.program_id(1) * KT
    if not EVEN_K:
        k = tl.minimum(k, KB - KT)
    words = tl.load(bricks_at(codes, brick, NB, KB, KT, NT, 128, 128) + k * 128)
    at_scale = bricks_at(scale, brick, NB, KB, KT, NT, 16, 16 * WORDS) + k * 16 * WORDS
    scales = tl.load(at_scale)
    tile = decode_tile(words, scales, zeros_of(at_scale, scales, WORDS), KIND, KT, NT)
    row = tl.program_id(0) * NT * 16 + tl.arange(0, NT * 16)
    factor = tl.load(row_scale + first + row, mask=row < rows, other=0.0).to(tl.float32) * DESCALE
    column = k * BRICK + tl.arange(0, KT * BRICK)
    values = (tile.to(tl.float32) * factor[:, None]).to(out.dtype.element_ty)
    inside = (row < rows)[:, None] & (column < K)[None, :]
    tl.store(out + row.to(tl.int64)[:, None] * K + column[None, :], values, mask=inside)


def descale(kind: str) -> float:
    """What a sum of products with decoded weights must be multiplied with, beside the row's scale."""
    made = KINDS[kind]
    return 2.0 ** (126 - made.shift) if made.code == "e2m1" else 1.0


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    kind: str,
    out: torch.Tensor,
    first: int = 0,
) -> torch.Tensor:
    """out [rows, inputs] = the packed weights from row `first` on, which must be a multiple of 16; returns `out`."""
    if first % BRICK_ROWS:
        raise ValueError(f"rows from {first} on: a brick begins at a multiple of {BRICK_ROWS}")
    (rows, inputs), (row_bricks, input_bricks) = out.shape, codes.shape[:2]
    if shape_of(row_scale.shape[0], inputs, kind) != (row_bricks, input_bricks):
        raise ValueError(f"bricks {tuple(codes.shape[:2])} do not hold {row_scale.shape[0]} rows of {inputs} inputs")
    across, down = 2 if input_bricks > 1 else 1, 4
    grid = (cdiv(rows, down * BRICK_ROWS), cdiv(input_bricks, across))
    options = {"KIND": kind, "WORDS": KINDS[kind].words, "DESCALE": descale(kind), "KT": across, "NT": down}
    options["BRICK"] = KINDS[kind].brick
    options |= {"EVEN_K": input_bricks % across == 0}
    tensors = (codes, scale, row_scale, out)
    launch(dequantize_kernel, grid, *tensors, first, rows, inputs, row_bricks, input_bricks, **options)
    return out


def bricks_across(depth: int, kind: str) -> int:
    """Bricks along `depth` inputs of a tile. Raises `ValueError` for a part of one."""
    if depth % KINDS[kind].brick:
        raise ValueError(f"a tile of {depth} inputs cuts bricks of {KINDS[kind].brick}")
    return depth // KINDS[kind].brick
