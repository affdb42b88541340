"""Products of many rows against float64 products of what each path really multiplies: rounded weights, rounded activations."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from samovar.native.abi import GROUP, Format
from samovar.native.library import load
from samovar.native.team import Team
from tests.native.linear_cases import (
    EPSILON,
    Doubles,
    Floats,
    Options,
    Weight,
    exact_error,
    in_groups,
    run_linear,
    wide_error,
)
from tests.native.random_blocks import FLAT, PLAIN, SUPER, WEIGHT_FORMATS, block_of

SETS = load().usable_isas()
SHAPES = {"a tail": (37, 256), "one pass": (100, 768), "odd columns": (53, 333), "odd groups": (21, 352)}
ROWS = (13, 16, 17, 31, 33, 40, 64, 100)
ALL_ROWS = (*range(1, 41), 64, 100, 513)
LEAST_ROWS = 13
"""From so many rows on every format goes the wide way where it has one."""


@pytest.fixture(scope="module", params=SETS)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with_two = Team(num_threads=2, isa=request.param)
    yield with_two
    with_two.close()


@cache
def weight_of(format: Format, rows: int, cols: int, seed: int = 0) -> Weight:
    return Weight(format, rows, cols, seed)


@cache
def random_rows(rows: int, cols: int) -> Floats:
    rng = np.random.default_rng(rows + cols)
    sizes = np.exp(rng.uniform(-3, 3, (rows, 1)) + rng.uniform(-1, 1, (1, cols)))
    return (rng.standard_normal((rows, cols)) * sizes).astype(np.float32)


def product(team: Team, x: Floats, weight: Weight) -> Doubles:
    y = np.full((len(x), weight.rows + 3), 7, dtype=np.float32)
    run_linear(team, x, [weight], y)
    assert (y[:, weight.rows :] == 7).all(), "written beyond the outputs"
    return y[:, : weight.rows].astype(np.float64)


def to_even(x: Floats) -> Doubles:
    """Rounded to bfloat16, ties to even: activations."""
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return rounded.view(np.float32).astype(np.float64)


def away_from_zero(values: Doubles) -> Doubles:
    """Rounded to bfloat16, ties away from zero: weights."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + np.uint32(0x8000)) & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64)


def near_ties(weight: Weight) -> NDArray[np.bool_]:
    """Weights so near the middle of two bfloat16 numbers that float32's last bits decide; they may go either way."""
    bits = weight.values.astype(np.float32).view(np.uint32)
    middle = ((bits & np.uint32(0xFFFF0000)) | np.uint32(0x8000)).view(np.float32)
    return np.asarray(np.abs(weight.values - middle) <= 2.0**-19 * in_groups(weight))


def sums_error(cols: int, x: Doubles, values: Doubles) -> Doubles:
    """Of float32 sums: an epsilon for each addition, and each is at most the sum of magnitudes."""
    return EPSILON * (cols + 8) * (np.abs(x) @ np.abs(values).T) + 1e-30


def check_bfloat16(weight: Weight, x: Floats, y: Doubles) -> None:
    """Weights and activations were rounded once each, and nothing else was lost."""
    rounded, values = to_even(x), away_from_zero(weight.values)
    bound = sums_error(weight.cols, rounded, values)
    bound += np.abs(rounded) @ (near_ties(weight) * np.abs(weight.values) * 2.0**-7).T
    off = np.abs(y - rounded @ values.T) / bound
    assert (off <= 1).all(), f"off by {off.max():.3g} bounds"
    straight = np.abs(y - x.astype(np.float64) @ weight.values.T)
    assert (straight <= wide_error(weight, x.astype(np.float64))).all()


def check_int8(weight: Weight, x: Floats, y: Doubles) -> None:
    """Activations were rounded to 127ths of their row's largest; their products are exact."""
    most = np.abs(x).max(axis=1, keepdims=True)
    codes = np.rint(x * (np.float32(127) / most)).astype(np.float64)
    scales = (most / np.float32(127)).astype(np.float64)
    expected = codes @ weight.values.T * scales
    assert (np.abs(y - expected) <= 4 * EPSILON * (np.abs(codes) @ np.abs(weight.values).T) * scales).all()


def check(team: Team, weight: Weight, x: Floats, y: Doubles) -> None:
    """The path that this set takes for so many rows."""
    exact = x.astype(np.float64)
    if weight.format is Format.F32:
        bound = 1e-6 * (np.abs(exact) @ np.abs(weight.values).T)
    elif team.isa == "amx" and weight.format is Format.I8:
        return check_int8(weight, x, y)
    elif team.isa == "amx" or (team.isa == "avx512_vnni" and weight.format is Format.BF16):
        return check_bfloat16(weight, x, y)
    elif weight.format in PLAIN:
        bound = sums_error(weight.cols, exact, weight.values)
    else:
        return None  # small.h at any number of rows: test_linear.py
    off = np.abs(y - exact @ weight.values.T) / bound
    assert (off <= 1).all(), f"off by {off.max():.3g} bounds"
    return None


@pytest.mark.parametrize("format", WEIGHT_FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("shape", SHAPES)
def test_many_rows(team: Team, format: Format, shape: str) -> None:
    outputs, cols = SHAPES[shape]
    if cols % block_of(format):
        pytest.skip("these columns do not fill blocks of this format")
    weight, x = weight_of(format, outputs, cols), random_rows(max(ROWS), cols)
    for rows in ROWS:
        check(team, weight, x[:rows], product(team, x[:rows], weight))


@pytest.mark.parametrize("format", [Format.F32, Format.BF16, Format.I8, Format.Q4_0, Format.Q6_K], ids=lambda f: f.name)
def test_many_columns(team: Team, format: Format) -> None:
    """More than a group of panels holds at a time: sums wait between passes. And more rows than pass one group."""
    cols = 4352 if format in SUPER else 2080
    weight, x = weight_of(format, 300, cols), random_rows(530, cols)
    for rows in (20, 530):
        check(team, weight, x[:rows], product(team, x[:rows], weight))


@pytest.mark.parametrize("cols", [333, 1024])
def test_float32_rows_do_not_depend_on_the_batch(team: Team, cols: int) -> None:
    """A row of an exact product has the same bits alone and among others."""
    weight, x = weight_of(Format.F32, 53, cols), random_rows(40, cols)
    together = product(team, x, weight)
    for rows in (1, 2, 3, 5, 8, 9, 17):
        np.testing.assert_array_equal(product(team, x[:rows], weight), together[:rows])


@pytest.mark.parametrize("format", [Format.F16, Format.BF16], ids=lambda format: format.name)
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_few_rows_of_plain_weights_are_exact(team: Team, format: Format, rows: int) -> None:
    """Activations stay float32; sums of 16-bit weights lose what float32 sums lose."""
    for outputs, cols in SHAPES.values():
        weight, x = weight_of(format, outputs, cols), random_rows(rows, cols)
        exact = x.astype(np.float64)
        off = np.abs(product(team, x, weight) - exact @ weight.values.T)
        assert (off <= sums_error(cols, exact, weight.values)).all()


def test_float16_weights_of_all_sizes(team: Team) -> None:
    """Denormal weights and the largest ones count, an infinity and a NaN are not lost."""
    weight = Weight(Format.F16, 16, 64)
    source = np.zeros((16, 64), dtype=np.float16)
    source[0], source[1], source[2, 5], source[3, 6] = 6e-8, 65504, np.inf, np.nan
    weight.matrix.pack(source.view(np.uint8))
    for rows in (1, 20):
        y = product(team, np.ones((rows, 64), dtype=np.float32), weight)
        rounding = 2.0**-8 if rows > 1 and team.isa == "amx" else 1e-6
        np.testing.assert_allclose(y[:, 0], 64 * float(np.float16(6e-8)), rtol=rounding)
        np.testing.assert_allclose(y[:, 1], 64 * 65504, rtol=rounding)
        assert (y[:, 2] == np.inf).all() and np.isnan(y[:, 3]).all() and not y[:, 4:].any()


PAIRS = [
    (Format.Q4_K, Format.Q6_K), (Format.Q4_0, Format.Q4_0), (Format.BF16, Format.BF16), (Format.I8, Format.I8),
    (Format.F32, Format.F32), (Format.F32, Format.BF16), (Format.F16, Format.Q8_0),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].name} and {pair[1].name}")
@pytest.mark.parametrize("rows", [1, 17, 70])
def test_gated_pairs(team: Team, pair: tuple[Format, Format], rows: int) -> None:
    """The gate and what it multiplies meet at the same output, whatever their formats."""
    gate, up = weight_of(pair[0], 53, 512), weight_of(pair[1], 53, 512, 1)
    x = random_rows(rows, 512)
    y = np.zeros((rows, 53), dtype=np.float32)
    run_linear(team, x, [gate, up], y, Options(activation=0))
    g, u = product(team, x, gate), product(team, x, up)
    with np.errstate(over="ignore"):
        expected = g / (1 + np.exp(-g)) * u
    # Of a mixed pair both may go the way of few rows, which rounds otherwise than each alone.
    wide_x = x.astype(np.float64)
    slack = [wide_error(weight, wide_x) + exact_error(weight, wide_x) for weight in (gate, up)]
    bound = 1e-5 * np.abs(expected) + 1e-30
    if pair[0] is not pair[1]:
        bound = bound + 2 * (slack[0] * np.abs(u) + slack[1] * np.abs(g) + slack[0] * slack[1])
    assert (np.abs(y - expected) <= bound).all()


@pytest.mark.slow
@pytest.mark.parametrize("format", WEIGHT_FORMATS, ids=lambda format: format.name)
def test_every_number_of_rows(team: Team, format: Format) -> None:
    for outputs, cols in ((37, 512), (130, 2304), *(((53, 333),) if block_of(format) == 1 else ())):
        weight, x = weight_of(format, outputs, cols), random_rows(max(ALL_ROWS), cols)
        for rows in ALL_ROWS:
            y = product(team, x[:rows], weight)
            if rows >= LEAST_ROWS or format is Format.F32:
                check(team, weight, x[:rows], y)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_random_shapes(team: Team, seed: int) -> None:
    rng = np.random.default_rng(seed)
    format = Format(rng.choice(np.array((*PLAIN, Format.I8, *FLAT, *SUPER))))
    cols = int(rng.integers(1, 20)) * max(block_of(format), GROUP) + (
        int(rng.integers(0, 31)) if block_of(format) == 1 else 0
    )
    weight, x = (
        weight_of(format, int(rng.integers(1, 400)), cols, seed),
        random_rows(int(rng.integers(LEAST_ROWS, 600)), cols),
    )
    check(team, weight, x, product(team, x, weight))
