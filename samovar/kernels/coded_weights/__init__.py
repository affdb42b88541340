"""Weights of four and eight bits in the order in which tensor cores want them: tables of 16 numbers, integers, E4M3.

A weight is number[code] * group scale * row scale. Codes lie in bricks of 16 rows and 64 inputs (of eight bits: 32), 512
bytes each: what one thread of a warp feeds to a 16x16 matrix instruction, in its registers' order, is what it loads as 16
bytes (the idea of Marlin, Frantar et al., 2024). Beside a brick lies one word of 32 bits for each of its rows, with the
scales of the row's groups in a form from which bfloat16 is made by one instruction. So every format takes 4.5 bits for a
weight (with groups of 32 inputs and zero points 5, of eight bits 9).

    codes  int32 [row bricks, input bricks, 8, 4, 2, 2]  lane = (row % 8, input pair), then row / 8 % 2, then input / 32 % 2
    scale  int32 [row bricks, input bricks, words, 8, 2] (row % 8, row / 8 % 2)

A word of codes holds inputs 16j + 8h + 2t + p for j, h, p in {0, 1} and the lane's t: half p of the word has the four
codes (j, h), each spread over the bits that `PLACES` names. Of eight bits, the second word has input / 16, and a half the
two codes h. Rows and inputs beyond the end are zeros.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BRICK_ROWS = 16
CHUNK_WEIGHTS = 1 << 24
"""Weights that are packed at once, so that packing a layer takes little memory beside it."""

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
INT4 = tuple(float(code) for code in range(16))
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution (Dettmers et al., QLoRA, 2023); kernels have them as bfloat16."""
_FP4 = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4 = (*_FP4, *(-value for value in _FP4))
"""The four-bit float of bitsandbytes, likewise."""
INT8 = tuple(float(code - 256 if code > 127 else code) for code in range(256))
"""Codes are integers in two's complement."""
E4M3 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())
TABLES = {"e2m1": E2M1, "int4": INT4, "nf4": NF4, "fp4": FP4, "int8": INT8, "e4m3": E4M3}
"""The numbers of each kind of code."""

Places = tuple[tuple[int, ...], ...]


def _both_halves(half: Places) -> tuple[Places, Places]:
    """The same places in the upper 16 bits of a word."""
    return half, tuple(tuple(bit + 16 for bit in place) for place in half)


PLACES: dict[str, tuple[Places, Places]] = {
    # Sign and exponent stand where bfloat16 has them, or a multiplication by a power of two to the right of that.
    "e2m1": _both_halves(((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))),
    "int4": _both_halves(((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11), (12, 13, 14, 15))),
    # A selector of four places, first the halves' first codes: tables are looked up four codes at a time.
    "nf4": (
        tuple(tuple(range(8 * i, 8 * i + 4)) for i in range(4)),
        tuple(tuple(range(8 * i + 4, 8 * i + 8)) for i in range(4)),
    ),
    "int8": _both_halves((tuple(range(8)), tuple(range(8, 16)))),
    "e4m3": _both_halves(((4, 5, 6, 7, 8, 9, 10, 15), (0, 1, 2, 3, 11, 12, 13, 14))),
}
"""For each kind of code, and p = 0 and 1, the bits of a word's codes (j, h), or of eight bits h, lowest bit first."""
PLACES["fp4"] = PLACES["nf4"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What codes and scale words mean.

    `group` inputs share a scale. Scale words: of 16 inputs four bytes with five bits of exponent and three of mantissa;
    of 32 (of eight bits: of 16) two bfloat16 numbers; of 64 one, in the low half. With `has_zero`, minus (128 + zero
    point) follows as bfloat16: in the high half, or in a second word. `shift` is the power of two by which a
    bfloat16 scale is larger than what it stands for.
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
        """What the codes mean; integers of four bits are 0 to 15, less the zero point."""
        return TABLES[self.code]

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if len(self.values) == 16 else 8

    @property
    def brick(self) -> int:
        """Inputs of a brick."""
        return 256 // self.bits

    @property
    def has_small_scale(self) -> bool:
        """Whether scales have a byte each."""
        return self.bits == 4 and self.group == 16

    @property
    def padding(self) -> int:
        """The code that means zero, or does no harm."""
        return self.values.index(0.0)


KINDS = {
    "e2m1_16": Kind("e2m1", 16, shift=118),
    "e2m1_32": Kind("e2m1", 32, shift=126),
    "int4_32": Kind("int4", 32),
    "int4_64": Kind("int4", 64),
    "int4_32_zero": Kind("int4", 32, has_zero=True),
    "int4_64_zero": Kind("int4", 64, has_zero=True),
    "nf4_64": Kind("nf4", 64),
    "fp4_64": Kind("fp4", 64),
    "int8_16": Kind("int8", 16),
    "e4m3_16": Kind("e4m3", 16, shift=120),
}
"""By the name that ops take. Groups that are a multiple of 64 (of eight bits: of 16) have their scale in
each of their bricks."""

MIDDLE = 8
"""The zero point of integers that have none of their own."""
_SMALL_BIAS = 848
"""What is taken from the upper twelve bits of a float32 to make a byte of a scale: exponents from -21 on."""


def shape_of(rows: int, inputs: int, kind: str) -> tuple[int, int]:
    """Bricks along the rows and the inputs of a matrix."""
    return -(-rows // BRICK_ROWS), -(-inputs // KINDS[kind].brick)


def pack_codes(codes: torch.Tensor, kind: str) -> torch.Tensor:
    """Codes [rows, inputs], one a byte -> int32 [row bricks, input bricks, 128]; what is added is `Kind.padding`."""
    (rows, inputs), made = codes.shape, KINDS[kind]
    row_bricks, input_bricks = shape_of(rows, inputs, kind)
    packed = codes.new_empty(row_bricks, input_bricks, 128, dtype=torch.int32)
    step = max(1, CHUNK_WEIGHTS // (BRICK_ROWS * made.brick * input_bricks))
    for first in range(0, row_bricks, step):
        part = codes[first * BRICK_ROWS : (first + step) * BRICK_ROWS]
        packed[first : first + step] = _pack(_padded(part, BRICK_ROWS, made.brick, made.padding), made)
    return packed


def _padded(values: torch.Tensor, rows: int, columns: int, value: int = 0) -> torch.Tensor:
    short = (-len(values) % rows, -values.shape[1] % columns)
    return torch.nn.functional.pad(values, (0, short[1], 0, short[0]), value=value) if any(short) else values


def _pack(codes: torch.Tensor, kind: Kind) -> torch.Tensor:
    """Whole bricks [rows, inputs] -> int32 [row bricks, input bricks, 128]."""
    # (row brick, row / 8, row % 8), (input brick, word, codes of a half, t, p)
    cut = codes.view(len(codes) // 16, 2, 8, codes.shape[1] // kind.brick, 2, 16 // kind.bits, 4, 2)
    cut = cut.permute(0, 3, 2, 6, 1, 4, 7, 5).to(torch.int32)
    words = torch.zeros(cut.shape[:6], dtype=torch.int32, device=codes.device)
    for p, of_half in enumerate(PLACES[kind.code]):
        for place, bits in enumerate(of_half):
            code = cut[..., p, place]
            for bit, target in enumerate(bits):
                words |= ((code >> bit) & 1) << target
    return words.flatten(2)


def unpack_codes(packed: torch.Tensor, kind: str) -> torch.Tensor:
    """The inverse of `pack_codes`: uint8 [rows, inputs] of all bricks."""
    made = KINDS[kind]
    words = packed.view(*packed.shape[:2], 8, 4, 2, 2)
    codes = torch.zeros(*words.shape, 2, 16 // made.bits, dtype=torch.uint8, device=packed.device)
    for p, of_half in enumerate(PLACES[made.code]):
        for place, bits in enumerate(of_half):
            for bit, source in enumerate(bits):
                codes[..., p, place] |= (((words >> source) & 1) << bit).to(torch.uint8)
    # (row brick, input brick, row % 8, t, row / 8, word, p, code of a half) -> rows, inputs
    codes = codes.permute(0, 4, 2, 1, 5, 7, 3, 6)
    return codes.reshape(packed.shape[0] * BRICK_ROWS, packed.shape[1] * made.brick)


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
    """[rows, groups] of 16 bits -> [rows, bricks] words."""
    halves = _padded(halves, 1, 2)
    return halves[:, ::2] | (halves[:, 1::2] << 16)


def unpack_scale(packed: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale words -> (scales, zero points or None), float32 [rows, groups of the kind], of all bricks."""
    made = KINDS[kind]
    words = _by_rows(packed, made)
    if made.has_small_scale:
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
    table = table.to(torch.bfloat16).float()
    scales, zeros = unpack_scale(scale, kind)
    weight = table[places]
    if made.code == "int4":
        shift = torch.tensor(float(MIDDLE)) if zeros is None else zeros.repeat_interleave(made.group, 1)
        weight = weight - shift.to(weight.device)
    weight = weight * scales.repeat_interleave(made.group, 1)
    wide = torch.float64 if row_scale.dtype == torch.float64 else torch.float32
    return weight[:rows, :inputs].to(wide) * row_scale.to(wide)[:, None]
