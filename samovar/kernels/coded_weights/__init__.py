"""Weights of four bits in the order in which tensor cores want them, for every format that is a table of 16 numbers.

A weight is number[code] * group scale * row scale. Codes lie in bricks of 16 rows and 64 inputs, 512 bytes each: what one
thread of a warp feeds to a 16x16 matrix instruction, in its registers' order, is what it loads as 16 bytes (the idea of
Marlin, Frantar et al., 2024). Beside a brick lies one word of 32 bits for each of its rows, with the scales of the row's
groups in a form from which bfloat16 is made by one instruction. So every format takes 4.5 bits for a weight (with groups
of 32 inputs and zero points, 5).

    codes  int32 [row bricks, input bricks, 8, 4, 2, 2]  lane = (row % 8, input pair), then row / 8 % 2, then input / 32 % 2
    scale  int32 [row bricks, input bricks, words, 8, 2] (row % 8, row / 8 % 2)

A word of codes holds inputs 16j + 8h + 2t + p for j, h, p in {0, 1} and the lane's t: half p of the word has the four
codes (j, h), each spread over the bits that `PLACES` names. Rows and inputs beyond the end are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BRICK_ROWS, BRICK_INPUTS = 16, 64
CHUNK_WEIGHTS = 1 << 24
"""Weights that are packed at once, so that packing a layer takes little memory beside it."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = tuple(float(code) for code in range(16))

Places = tuple[tuple[int, int, int, int], ...]


def _both_halves(half: Places) -> tuple[Places, Places]:
    """The same places in the upper 16 bits of a word."""
    a, b, c, d = ((w + 16, x + 16, y + 16, z + 16) for w, x, y, z in half)
    return half, (a, b, c, d)


PLACES: dict[str, tuple[Places, Places]] = {
    # Sign and exponent stand where bfloat16 has them, or a multiplication by a power of two to the right of that.
    "e2m1": _both_halves(((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))),
    "int4": _both_halves(((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))),
}
"""For each kind of code, and p = 0 and 1, the bits of a word's four codes (j, h), lowest bit first."""


@dataclass(frozen=True, slots=True)
class Kind:
    """What codes and scale words mean.

    `group` inputs share a scale. Scale words: of 16 inputs four bytes with five bits of exponent and three of mantissa;
    of 32 two bfloat16 numbers; of 64 one, in the low half. With `has_zero`, minus (128 + zero point) follows as bfloat16:
    in the high half, or in a second word. `shift` is the power of two by which a bfloat16 scale is larger than what it
    stands for.
    """

    code: str
    group: int
    has_zero: bool = False
    shift: int = 0

    @property
    def words(self) -> int:
        """Words of 32 bits for each row of a brick."""
        return 2 if self.has_zero and self.group == 32 else 1

    @property
    def values(self) -> tuple[float, ...]:
        """What the codes mean; those of integers are 0 to 15, less the zero point."""
        return {"e2m1": E2M1, "int4": INT4}[self.code]


KINDS = {
    "e2m1_16": Kind("e2m1", 16, shift=118),
    "e2m1_32": Kind("e2m1", 32, shift=126),
    "int4_32": Kind("int4", 32),
    "int4_64": Kind("int4", 64),
    "int4_32_zero": Kind("int4", 32, has_zero=True),
    "int4_64_zero": Kind("int4", 64, has_zero=True),
}
"""By the name that ops take. Groups that are a multiple of 64 have their scale in each of their bricks."""

MIDDLE = 8
"""The zero point of integers that have none of their own."""
_SMALL_BIAS = 848
"""What is taken from the upper twelve bits of a float32 to make a byte of a scale: exponents from -21 on."""


def shape_of(rows: int, inputs: int) -> tuple[int, int]:
    """Bricks along the rows and the inputs of a matrix."""
    return -(-rows // BRICK_ROWS), -(-inputs // BRICK_INPUTS)


def pack_codes(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Codes [rows, inputs], one a byte -> int32 [row bricks, input bricks, 128]; what is added means zero for "e2m1"."""
    rows, inputs = codes.shape
    row_bricks, input_bricks = shape_of(rows, inputs)
    packed = codes.new_empty(row_bricks, input_bricks, 128, dtype=torch.int32)
    step = max(1, CHUNK_WEIGHTS // (BRICK_ROWS * BRICK_INPUTS * input_bricks))
    for first in range(0, row_bricks, step):
        part = codes[first * BRICK_ROWS : (first + step) * BRICK_ROWS]
        packed[first : first + step] = _pack(_padded(part, BRICK_ROWS, BRICK_INPUTS), PLACES[KINDS[kind].code])
    return packed


def _padded(values: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    short = (-len(values) % rows, -values.shape[1] % columns)
    return torch.nn.functional.pad(values, (0, short[1], 0, short[0])) if any(short) else values


def _pack(codes: torch.Tensor, places: tuple[Places, Places]) -> torch.Tensor:
    """Whole bricks [rows, inputs] -> int32 [row bricks, input bricks, 128]."""
    # (row brick, row / 8, row % 8), (input brick, word, j, h, t, p)
    cut = codes.view(len(codes) // 16, 2, 8, codes.shape[1] // 64, 2, 2, 2, 4, 2)
    cut = cut.permute(0, 3, 2, 7, 1, 4, 8, 5, 6).to(torch.int32)
    words = torch.zeros(cut.shape[:6], dtype=torch.int32, device=codes.device)
    for p, of_half in enumerate(places):
        for place, bits in enumerate(of_half):
            code = cut[..., p, place >> 1, place & 1]
            for bit, target in enumerate(bits):
                words |= ((code >> bit) & 1) << target
    return words.flatten(2)


def unpack_codes(packed: torch.Tensor, kind: str) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [rows, inputs] of all bricks."""
    words = packed.view(*packed.shape[:2], 8, 4, 2, 2)
    codes = torch.zeros(*words.shape, 2, 2, 2, dtype=torch.uint8, device=packed.device)
    for p, of_half in enumerate(PLACES[KINDS[kind].code]):
        for place, bits in enumerate(of_half):
            for bit, source in enumerate(bits):
                codes[..., p, place >> 1, place & 1] |= (((words >> source) & 1) << bit).to(torch.uint8)
    # (row brick, input brick, row % 8, t, row / 8, word, p, j, h) -> rows, inputs
    codes = codes.permute(0, 4, 2, 1, 5, 7, 8, 3, 6)
    return codes.reshape(packed.shape[0] * BRICK_ROWS, packed.shape[1] * BRICK_INPUTS)


def _in_bricks(words: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Words [rows, input bricks, words] of whole bricks -> int32 [row bricks, input bricks, 16 * words]."""
    cut = words.view(len(words) // 16, 2, 8, *words.shape[1:])
    return cut.permute(0, 3, 4, 2, 1).flatten(2).contiguous()


def _by_rows(packed: torch.Tensor, kind: Kind) -> torch.Tensor:
    """The inverse of `_in_bricks`."""
    cut = packed.view(*packed.shape[:2], kind.words, 8, 2).permute(0, 4, 3, 1, 2)
    return cut.reshape(packed.shape[0] * BRICK_ROWS, packed.shape[1], kind.words)


def small_scale(scale: torch.Tensor) -> torch.Tensor:
    """Positive e4m3 [rows, groups of 16] -> bytes in which exponents have five bits, so that none is denormal.

    NaN becomes 255. Zero becomes 0, which means 2 ** -21: its codes must be zero.
    """
    values = scale.float()
    byte = (values.view(torch.int32) >> 20) - _SMALL_BIAS
    byte = torch.where(values == 0, 0, byte)
    return torch.where(values.isnan(), 255, byte).to(torch.uint8)


def pack_small_scale(small: torch.Tensor) -> torch.Tensor:
    """Bytes of `small_scale` [rows, groups of 16] -> scale words of "e2m1_16"."""
    kind = KINDS["e2m1_16"]
    byte = _padded(small, BRICK_ROWS, 4).contiguous()
    return _in_bricks(byte.view(torch.int32).unsqueeze(-1), kind)


def pack_scale(scale: torch.Tensor, kind: str, zero: torch.Tensor | None = None) -> torch.Tensor:
    """Scales, rounded to bfloat16, and zero points [rows, groups] -> scale words of every kind but "e2m1_16".

    Scales must be larger by 2 ** `Kind.shift` already.
    """
    made = KINDS[kind]
    bits = _padded(scale.to(torch.bfloat16), BRICK_ROWS, 1).contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    shifted = None
    if made.has_zero:
        assert zero is not None
        minus = -(128.0 + _padded(zero.float(), BRICK_ROWS, 1))
        shifted = minus.to(torch.bfloat16).contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    if made.group == 64:
        high = 0 if shifted is None else shifted << 16
        return _in_bricks((bits | high).unsqueeze(-1), made)
    words = [_joined(bits)] + ([] if shifted is None else [_joined(shifted)])
    return _in_bricks(torch.stack(words, -1), made)


def _joined(halves: torch.Tensor) -> torch.Tensor:
    """[rows, groups of 32] of 16 bits -> [rows, groups of 64] words."""
    halves = _padded(halves, 1, 2)
    return halves[:, ::2] | (halves[:, 1::2] << 16)


def unpack_scale(packed: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale words -> (scales, zero points or None), float32 [rows, groups of the kind], of all bricks."""
    made = KINDS[kind]
    words = _by_rows(packed, made)
    if made.group == 16:
        small = torch.stack([(words[..., 0] >> (8 * i)) & 0xFF for i in range(4)], -1).flatten(1)
        bits = ((small << 4) | 0x7000) << 16
        return bits.view(torch.float32) * 2.0**-made.shift, None
    low, high = (words << 16).view(torch.float32), (words & ~0xFFFF).view(torch.float32)
    if made.group == 64:
        return low[..., 0] * 2.0**-made.shift, -128.0 - high[..., 0] if made.has_zero else None
    both = torch.stack((low, high), 2)  # [rows, bricks, groups, words]
    scale = both[..., 0].flatten(1) * 2.0**-made.shift
    return scale, -128.0 - both[..., 1].flatten(1) if made.has_zero else None


def decode(
    codes: torch.Tensor, scale: torch.Tensor, kind: str, rows: int, inputs: int, row_scale: torch.Tensor
) -> torch.Tensor:
    """The matrix [rows, inputs] that packed codes and scales stand for, float32 (float64 if `row_scale` is)."""
    made = KINDS[kind]
    places = unpack_codes(codes, kind).int()
    table = torch.tensor(made.values, device=codes.device)
    scales, zeros = unpack_scale(scale, kind)
    weight = table[places]
    if made.code == "int4":
        shift = torch.tensor(float(MIDDLE)) if zeros is None else zeros.repeat_interleave(made.group, 1)
        weight = weight - shift.to(weight.device)
    weight = weight * scales.repeat_interleave(made.group, 1)
    wide = torch.float64 if row_scale.dtype == torch.float64 else torch.float32
    return weight[:rows, :inputs].to(wide) * row_scale.to(wide)[:, None]
