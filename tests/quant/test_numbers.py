"""Number formats over all their codes, against values that are worked out from the bits, one by one, in Python."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch

from samovar.quant.numbers import codebooks, packing, small_floats
from samovar.quant.numbers.small_floats import E2M1_VALUES


def value_of(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> float:
    """What a code means by the rules of IEEE 754, without the special cases at the top."""
    sign = -1.0 if code >> (exponent_bits + mantissa_bits) else 1.0
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def e2m1(code: int) -> float:
    return value_of(code, 2, 1, 1)


def e4m3(code: int) -> float:
    return math.nan if code & 127 == 127 else value_of(code, 4, 3, 7)


def e5m2(code: int) -> float:
    if (code >> 2) & 31 == 31:
        return (-math.inf if code >> 7 else math.inf) if code & 3 == 0 else math.nan
    return value_of(code, 5, 2, 15)


def e8m0(code: int) -> float:
    return math.nan if code == 255 else math.ldexp(1.0, code - 127)


FLOATS: dict[str, tuple[int, Callable[[int], float], Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "e2m1": (16, e2m1, small_floats.decode_e2m1, small_floats.encode_e2m1),
    "e4m3": (256, e4m3, small_floats.decode_e4m3, small_floats.encode_e4m3),
    "e5m2": (256, e5m2, small_floats.decode_e5m2, small_floats.encode_e5m2),
}


def codes(count: int) -> torch.Tensor:
    return torch.arange(count).to(torch.uint8)


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.uint8).tolist()


def same(one: float, other: float) -> bool:
    return (math.isnan(one) and math.isnan(other)) or (
        one == other and math.copysign(1, one) == math.copysign(1, other)
    )


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_means_what_its_bits_say(name: str) -> None:
    count, meaning, decode, _ = FLOATS[name]
    found = decode(codes(count)).tolist()
    assert all(same(value, meaning(code)) for code, value in enumerate(found))


def test_every_power_of_two() -> None:
    """The smallest one is a denormal of float32, and must not become zero."""
    found = small_floats.decode_ue8m0(codes(256)).tolist()
    assert all(same(value, e8m0(code)) for code, value in enumerate(found)) and found[0] == 2.0**-127 > 0
    as_float8 = codes(256).view(torch.float8_e8m0fnu)
    assert torch.equal(small_floats.decode_ue8m0(as_float8)[:255], small_floats.decode_ue8m0(codes(255)))


@pytest.mark.parametrize("name", FLOATS)
def test_every_code_comes_back(name: str) -> None:
    count, meaning, _, encode = FLOATS[name]
    for code in range(count):
        value = meaning(code)
        back = bits(encode(torch.tensor([value])))[0]
        if math.isnan(value):
            assert math.isnan(meaning(back))
        elif math.isinf(value):
            assert meaning(back) == math.copysign(57344.0, value)
        else:
            assert back == code, (value, back)


@pytest.mark.parametrize("name", FLOATS)
def test_rounding_is_to_the_nearest_and_ties_go_to_the_even_code(name: str) -> None:
    """Between every two neighbours: the middle, and the float32 numbers just below and above it."""
    count, meaning, _, encode = FLOATS[name]
    finite = [code for code in range(count // 2) if math.isfinite(meaning(code))]
    for low, high in pairwise(finite):
        middle = (meaning(low) + meaning(high)) / 2
        even = low if low % 2 == 0 else high
        below = torch.nextafter(torch.tensor([middle]), torch.tensor([0.0]))
        above = torch.nextafter(torch.tensor([middle]), torch.tensor([math.inf]))
        sign = count // 2
        for value, expected in ((below, low), (torch.tensor([middle]), even), (above, high)):
            assert bits(encode(value)) == [expected], (low, float(value))
            assert bits(encode(-value)) == [expected + sign], (low, float(value))


@pytest.mark.parametrize("name", FLOATS)
def test_what_is_too_large_becomes_the_largest(name: str) -> None:
    count, meaning, _, encode = FLOATS[name]
    largest = max(meaning(code) for code in range(count) if math.isfinite(meaning(code)))
    for value in (largest * 1.01, largest * 100, 3e38, math.inf):
        assert [meaning(code) for code in bits(encode(torch.tensor([value, -value])))] == [largest, -largest]


def test_nan_has_a_fixed_fate() -> None:
    nan = torch.tensor([math.nan, -math.nan])
    assert bits(small_floats.encode_e2m1(nan)) == [7, 7]
    assert small_floats.encode_e4m3(nan).float().isnan().all()
    assert small_floats.encode_e5m2(nan).float().isnan().all()
    assert bits(small_floats.encode_ue8m0(nan)) == [255, 255]
    assert small_floats.encode_ue4m3(nan).float().isnan().all()


def test_other_types_round_once() -> None:
    """bfloat16 and float16 numbers, and float64 ones that float32 holds, give the code of their value."""
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 0.3, -0.25])
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        typed = values.to(dtype)
        assert torch.equal(small_floats.encode_e2m1(typed), small_floats.encode_e2m1(typed.float()))


def test_scales_without_a_sign() -> None:
    """UE4M3: rounding may carry into the next power of two; denormals exist; negative numbers become zero."""
    found = small_floats.encode_ue4m3(torch.tensor([-1.0, -0.0, 0.0, 1.97, 31.5, 2.0**-9, 2.0**-10, 2.0**-11, 1e9]))
    assert found.float().tolist() == [0.0, 0.0, 0.0, 2.0, 32.0, 2.0**-9, 0.0, 0.0, 448.0]
    assert all(code < 128 for code in bits(found)[2:])


@pytest.mark.parametrize(
    ("rounding", "expected"),
    [
        ("down", [127, 127, 127, 127, 128, 0, 0, 254, 254]),
        ("nearest", [127, 127, 128, 128, 128, 0, 0, 254, 254]),
        ("up", [127, 128, 128, 128, 128, 0, 0, 254, 254]),
    ],
)
def test_scales_that_are_powers_of_two(rounding: small_floats.Rounding, expected: list[int]) -> None:
    given = torch.tensor([1.0, 1.49, 1.5, 1.99, 2.0, 0.0, -3.0, 3e38, math.inf])
    assert bits(small_floats.encode_ue8m0(given, rounding)) == expected


@pytest.mark.parametrize("rounding", ["down", "nearest", "up"])
def test_powers_of_two_are_not_rounded(rounding: small_floats.Rounding) -> None:
    every = small_floats.decode_ue8m0(codes(255))
    assert bits(small_floats.encode_ue8m0(every, rounding)) == list(range(255))


@pytest.mark.parametrize("name", codebooks.VALUES)
def test_tables_give_the_nearest_value(name: str) -> None:
    values = codebooks.VALUES[name]
    for value in values:
        assert values[int(codebooks.encode(torch.tensor([value]), values))] == value
    dense = torch.linspace(-1.2, 1.2, 4801)
    distance = (torch.tensor(values)[:, None] - dense).abs()
    chosen = codebooks.encode(dense, values)
    assert torch.all(distance[chosen.long(), torch.arange(len(dense))] <= distance.amin(0) + 1e-7)
    assert codebooks.decode(codebooks.encode(torch.tensor([math.nan, 0.0, -0.0]), values), values).tolist() == [0, 0, 0]


def stream(values: list[int], width: int) -> list[int]:
    """A dense stream as one long number, cut into words."""
    number = sum(value << (i * width) for i, value in enumerate(values))
    words = [(number >> (32 * i)) & 0xFFFFFFFF for i in range(-(-len(values) * width // 32))]
    return [word - (1 << 32) if word >> 31 else word for word in words]


@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 7, 31, 32, 33, 64, 100])
def test_dense_streams(width: int, count: int) -> None:
    """Every width and tail, along both axes, against arithmetic on one long integer."""
    generator = torch.Generator().manual_seed(width * 1000 + count)
    values = torch.randint(0, 1 << width, (3, count), generator=generator).to(torch.uint8)
    packed = packing.pack(values, width)
    assert packed.dtype == torch.int32 and packed.tolist() == [stream(row, width) for row in values.tolist()]
    assert torch.equal(packing.unpack(packed, width, count), values)
    turned = packing.pack(values.t().contiguous(), width, 0)
    assert torch.equal(turned, packed.t()) and torch.equal(packing.unpack(turned, width, count, 0), values.t())


def test_awq_order() -> None:
    """A word's nibbles, lowest first, are outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    assert packing.unpack_awq(torch.tensor([[0x76543210]], dtype=torch.int32)).tolist() == [[0, 4, 1, 5, 2, 6, 3, 7]]
    values = torch.randint(0, 16, (5, 24)).to(torch.uint8)
    assert torch.equal(packing.unpack_awq(packing.pack_awq(values)), values)
    assert packing.pack_awq(torch.full((1, 8), 15, dtype=torch.uint8)).tolist() == [[-1]]


def test_two_to_a_byte() -> None:
    every = codes(256)
    for high_first in (False, True):
        pairs = packing.unpack_pairs(every, high_first=high_first)
        assert torch.equal(packing.pack_pairs(pairs, high_first=high_first), every)
    assert packing.unpack_pairs(torch.tensor([0xA3], dtype=torch.uint8)).tolist() == [3, 10]
    assert packing.unpack_pairs(torch.tensor([0xA3], dtype=torch.uint8), high_first=True).tolist() == [10, 3]


def test_the_table_of_e2m1_is_in_order() -> None:
    assert list(E2M1_VALUES) == [e2m1(code) for code in range(16)]


def test_rounding_to_e2m1_in_fewer_steps() -> None:
    """Every middle, its neighbours on both sides, and much between and beyond."""
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(E2M1_VALUES[:8])])
    near = torch.cat((middles, middles.nextafter(torch.tensor(9.0)), middles.nextafter(torch.tensor(0.0))))
    x = torch.cat((near, torch.linspace(0, 9, 5000), torch.tensor([1e-30, 1e30])))
    x = torch.cat((x, -x))
    assert torch.equal(small_floats.round_e2m1(x), small_floats.decode_e2m1(small_floats.encode_e2m1(x)))
