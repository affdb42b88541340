"""LINEAR against float64 products of the unpacked weights: all formats, all sets of this machine, odd sizes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from samovar.native.abi import Format
from samovar.native.library import NativeError, load
from samovar.native.team import Team
from tests.native.linear_cases import EPSILON, Options, Weight, check_product, quantized, run_linear
from tests.native.random_blocks import FLAT, PLAIN, SUPER, WEIGHT_FORMATS, block_of

ROWS = (1, 2, 3, 5, 8, 17, 64)
SHAPES = {"one lane": (1, 256), "a tail": (37, 512), "odd groups": (80, 288), "odd columns": (21, 77)}
"""Outputs and inputs; formats take the shapes whose columns fill their blocks."""
CASES = [(format, shape) for format in WEIGHT_FORMATS for shape in SHAPES if SHAPES[shape][1] % block_of(format) == 0]
SETS = load().usable_isas()


@pytest.fixture(scope="module", params=SETS)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with_two = Team(num_threads=2, isa=request.param)
    yield with_two
    with_two.close()


@cache
def weight_of(format: Format, rows: int, cols: int, seed: int = 0) -> Weight:
    return Weight(format, rows, cols, seed)


def random_rows(rows: int, cols: int, seed: int = 3) -> np.ndarray:
    """Rows of very different sizes, so that a scale used for the wrong row or group is seen."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(-6, 6, (rows, 1))) * np.exp(rng.uniform(-2, 2, (1, cols)))
    return (rng.standard_normal((rows, cols)) * sizes).astype(np.float32)


@pytest.mark.parametrize(("format", "shape"), CASES, ids=lambda value: getattr(value, "name", value))
def test_products(team: Team, format: Format, shape: str) -> None:
    outputs, cols = SHAPES[shape]
    weight = weight_of(format, outputs, cols)
    x = random_rows(max(ROWS), cols)
    for rows in ROWS:
        y = np.full((rows, outputs + 5), 7, dtype=np.float32)
        run_linear(team, x[:rows], [weight], y)
        check_product(weight, x[:rows], y[:, :outputs].astype(np.float64))
        assert (y[:, outputs:] == 7).all(), "written beyond the outputs"


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_matrices_side_by_side(team: Team, rows: int) -> None:
    """Formats may differ, and none but the last needs to fill its panel."""
    formats = (Format.Q4_K, Format.F32, Format.Q6_K, Format.BF16, Format.Q8_0)
    weights = [weight_of(format, 24 + n, 512, n) for n, format in enumerate(formats)]
    x, total = random_rows(rows, 512), sum(weight.rows for weight in weights)
    y = np.full((rows, total + 1), 7, dtype=np.float32)
    run_linear(team, x, weights, y)
    at = 0
    for weight in weights:
        check_product(weight, x, y[:, at : at + weight.rows].astype(np.float64))
        at += weight.rows
    assert (y[:, total] == 7).all()


@pytest.mark.parametrize("format", [Format.F32, Format.I8, Format.Q4_0, Format.Q4_1, Format.Q6_K], ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [1, 6, 40])
def test_bias_and_sum(team: Team, format: Format, rows: int) -> None:
    weights = [weight_of(format, 37, 256), weight_of(format, 16, 256, 1)]
    rng = np.random.default_rng(1)
    x, bias = rng.standard_normal((rows, 256), dtype=np.float32), rng.standard_normal(53, dtype=np.float32)
    before = rng.standard_normal((rows, 53), dtype=np.float32)
    plain, biased, both = np.zeros_like(before), np.zeros_like(before), before.copy()
    run_linear(team, x, weights, plain)
    run_linear(team, x, weights, biased, Options(bias=bias))
    run_linear(team, x, weights, both, Options(bias=bias, adds=True))
    np.testing.assert_array_equal(biased, plain + bias)
    np.testing.assert_array_equal(both, plain + bias + before)


def normed(x: np.ndarray, norm: np.ndarray, epsilon: float) -> np.ndarray:
    wide = x.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + epsilon) * norm


@pytest.mark.parametrize("format", [Format.F32, Format.BF16, Format.Q8_0, Format.Q3_K, Format.I8], ids=lambda f: f.name)
@pytest.mark.parametrize("rows", [1, 5, 30])
@pytest.mark.parametrize("cols", [256, 2304])
def test_norm_of_the_input(team: Team, format: Format, rows: int, cols: int) -> None:
    weight, rng = weight_of(format, 20, cols), np.random.default_rng(2)
    x, norm = random_rows(rows, cols), rng.uniform(0.5, 2, cols).astype(np.float32)
    y = np.zeros((rows, 20), dtype=np.float32)
    run_linear(team, x, [weight], y, Options(norm=norm, epsilon=1e-3))
    expected = normed(x, norm, 1e-3)
    # A value may be rounded to the next code where the norm's last bits differ, so the bound is that of rounding at all.
    _, steps = quantized(expected.astype(np.float32))
    size = np.abs(weight.values).T
    bound = (
        0.501 * (steps @ size)
        if rows <= 4
        else np.maximum(0.501 * (steps @ size), 2.0**-8 * 1.01 * (np.abs(expected) @ size))
    )
    if format is Format.F32:
        bound = 0 * bound
    bound = bound + EPSILON * (cols + 16) * (np.abs(expected) @ size)
    assert (np.abs(y - expected @ weight.values.T) <= bound).all()


@pytest.mark.parametrize("format", [Format.F32, Format.BF16, Format.I8, *FLAT, *SUPER], ids=lambda format: format.name)
def test_no_rows_change_nothing(team: Team, format: Format) -> None:
    y = np.full((2, 21), 7, dtype=np.float32)
    x = np.ones((2, 256), dtype=np.float32)
    run_linear(team, x[:0], [weight_of(format, 21, 256)], y)
    assert (y == 7).all()


@pytest.mark.parametrize("format", [Format.F32, Format.BF16, Format.I8, *FLAT, *SUPER], ids=lambda format: format.name)
@pytest.mark.parametrize("rows", [2, 40])
def test_zeros_and_what_is_not_finite(team: Team, format: Format, rows: int) -> None:
    """A row of zeros gives zeros, one with an infinity or a NaN nothing finite, and neither disturbs its neighbours."""
    weight, x = weight_of(format, 37, 256), random_rows(rows, 256)
    expected, y = np.zeros((rows, 37), dtype=np.float32), np.zeros((rows, 37), dtype=np.float32)
    run_linear(team, x, [weight], expected)
    x[0] = 0
    run_linear(team, x, [weight], y)
    assert not y[0].any()
    np.testing.assert_array_equal(y[1:], expected[1:])
    for wrong in (np.nan, np.inf, -np.inf):
        x[0], x[0, 100] = 1, wrong
        run_linear(team, x, [weight], y)
        reached = weight.values[:, 100] != 0
        assert not np.isfinite(y[0, reached]).any()
        np.testing.assert_array_equal(y[1:], expected[1:])


def test_tiny_and_huge_inputs(team: Team) -> None:
    """Groups of denormals count as nothing, groups near the largest number do not overflow on the way."""
    weight = weight_of(Format.Q8_0, 16, 256)
    x = np.zeros((3, 256), dtype=np.float32)
    x[0], x[1, :40], x[2] = 1e-40, 1e-38, 1e35
    y = np.zeros((3, 16), dtype=np.float32)
    run_linear(team, x, [weight], y)
    check_product(weight, x, y.astype(np.float64))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_random_calls(team: Team, seed: int) -> None:
    rng = np.random.default_rng(seed)
    cols = int(rng.choice([256, 512, 768, 2048, 4352]))
    rows = int(rng.integers(1, 140))
    formats = rng.choice(np.array(WEIGHT_FORMATS), int(rng.integers(1, 4)))
    weights = [weight_of(Format(format), int(rng.integers(1, 300)), cols, seed) for format in formats]
    x, total = random_rows(rows, cols, seed), sum(weight.rows for weight in weights)
    y = np.zeros((rows, total), dtype=np.float32)
    run_linear(team, x, weights, y)
    at = 0
    for weight in weights:
        check_product(weight, x, y[:, at : at + weight.rows].astype(np.float64))
        at += weight.rows


@pytest.mark.parametrize("format", PLAIN, ids=lambda format: format.name)
def test_one_thread_gives_the_same(format: Format) -> None:
    """How the work is cut must not show in the result."""
    alone, two = Team(num_threads=1), Team(num_threads=2)
    for rows in (1, 4, 33):
        x, weight = random_rows(rows, 512), weight_of(format, 200, 512)
        results = [np.zeros((rows, 200), dtype=np.float32) for _ in range(2)]
        for team, y in zip((alone, two), results, strict=True):
            run_linear(team, x, [weight], y)
        np.testing.assert_array_equal(results[0], results[1])
    alone.close()
    two.close()


def test_refusals(team: Team) -> None:
    x, y = np.zeros((1, 256), dtype=np.float32), np.zeros((1, 64), dtype=np.float32)
    good, narrow = weight_of(Format.Q8_0, 16, 256), weight_of(Format.Q8_0, 16, 128)
    with pytest.raises(NativeError, match="columns"):
        run_linear(team, x, [good, narrow], y)
    with pytest.raises(NativeError, match="two matrices"):
        run_linear(team, x, [good], y, Options(activation=0))
    with pytest.raises(NativeError, match="activation"):
        run_linear(team, x, [good, good], y, Options(activation=9))
