"""GATED_LINEAR against its two products, and EMBED against the dequantized rows."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest

from samovar.native.abi import CInstruction, CMatrix, Count, Format, Op
from samovar.native.library import NativeError, load
from samovar.native.team import Team
from tests.native.linear_cases import Doubles, Floats, Options, Weight, run, run_linear
from tests.native.random_blocks import WEIGHT_FORMATS

SILU, GELU_TANH, GELU_ERF = range(3)


@pytest.fixture(scope="module", params=load().usable_isas())
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with_two = Team(num_threads=2, isa=request.param)
    yield with_two
    with_two.close()


@cache
def weight_of(format: Format, rows: int, cols: int, seed: int = 0) -> Weight:
    return Weight(format, rows, cols, seed)


def activated(kind: int, x: Doubles) -> Doubles:
    if kind == SILU:
        return x / (1 + np.exp(-np.clip(x, -700, None)))
    if kind == GELU_TANH:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def check_gated(gate: Doubles, up: Doubles, y: Floats, kind: int) -> None:
    """The products are the same numbers as LINEAR's; the activation adds an error of 4e-7 of its input at most."""
    expected = activated(kind, gate) * up
    assert (np.abs(y - expected) <= 1e-6 * (np.abs(gate) + 1e-6) * np.abs(up) + 1e-6 * np.abs(expected)).all()


@pytest.mark.parametrize("format", WEIGHT_FORMATS, ids=lambda format: format.name)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_gate_times_up(team: Team, format: Format, rows: int) -> None:
    """Few rows: each product is LINEAR's to the last bit, whichever way it goes."""
    pair = [weight_of(format, 37, 256), weight_of(format, 37, 256, 1)]
    x = np.random.default_rng(rows).standard_normal((rows, 256), dtype=np.float32)
    both, y = np.zeros((rows, 74), dtype=np.float32), np.full((rows, 40), 7, dtype=np.float32)
    run_linear(team, x, pair, both)
    run_linear(team, x, pair, y, Options(activation=SILU))
    check_gated(both[:, :37].astype(np.float64), both[:, 37:].astype(np.float64), y[:, :37], SILU)
    assert (y[:, 37:] == 7).all()


@pytest.mark.parametrize("kind", [SILU, GELU_TANH, GELU_ERF])
@pytest.mark.parametrize("formats", [(Format.F32, Format.F32), (Format.Q4_0, Format.Q6_K), (Format.BF16, Format.Q8_0)])
@pytest.mark.parametrize("rows", [2, 33])
def test_bias_norm_sum_and_unlike_formats(
    team: Team, kind: int, formats: tuple[Format, Format], rows: int
) -> None:  # fmt: skip
    pair = [weight_of(format, 50, 512, n) for n, format in enumerate(formats)]
    rng = np.random.default_rng(rows)
    x, bias = rng.standard_normal((rows, 512), dtype=np.float32), rng.standard_normal(100, dtype=np.float32)
    norm = rng.uniform(0.5, 2, 512).astype(np.float32)
    both, y = np.zeros((rows, 100), dtype=np.float32), np.ones((rows, 50), dtype=np.float32)
    run_linear(team, x, pair, both, Options(bias=bias, norm=norm))
    run_linear(team, x, pair, y, Options(bias=bias, norm=norm, adds=True, activation=kind))
    # Products of many rows may go another way in a pair than alone (int8 or bfloat16): then the bound is that of the ways.
    gate, up = both[:, :50].astype(np.float64), both[:, 50:].astype(np.float64)
    slack = (
        0.0 if rows <= 4 else 0.03 * np.abs(x * norm).max() * max(np.abs(w.values).max() for w in pair) * math.sqrt(512)
    )
    expected = activated(kind, gate) * up + 1
    size = np.abs(gate) + np.abs(up) + 1
    assert (np.abs(y - expected) <= 2e-6 * size**2 + slack * size).all()


def run_embed(team: Team, weight: Weight, ids: list[int], factor: float, y: Floats) -> None:
    matrix = (CMatrix * 1)(weight.matrix.c)
    program = (CInstruction * 1)()
    it = program[0]
    it.op, it.rows = Op.EMBED, Count.TOKENS
    it.input[:], it.output[:] = [-1, -1, -1, -1], [0, -1]
    it.i[0], it.f[0], it.p[0] = weight.cols, factor, ctypes.addressof(matrix)
    run(team, program, [y], len(ids), np.array(ids, dtype=np.int64))


@pytest.mark.parametrize("format", WEIGHT_FORMATS, ids=lambda format: format.name)
def test_embedding_rows(team: Team, format: Format) -> None:
    """Bit for bit the dequantized rows, in the order of the ids, each as often as asked for."""
    weight = weight_of(format, 53, 512)
    rng = np.random.default_rng(4)
    for count in (0, 1, 2, 77):
        ids = [int(id_) for id_ in rng.integers(0, 53, count)] if count != 2 else [52, 0]
        y = np.full((count + 1, 515), 7, dtype=np.float32)
        run_embed(team, weight, ids, 1.0, y)
        np.testing.assert_array_equal(y[:count, :512], weight.values[ids].astype(np.float32))
        assert (y[count] == 7).all() and (y[:, 512:] == 7).all()


def test_embedding_factor_and_missing_ids(team: Team) -> None:
    weight, y = weight_of(Format.Q8_0, 20, 256), np.full((4, 256), 7, dtype=np.float32)
    run_embed(team, weight, [3, -1, 20, 19], 24.0, y)
    np.testing.assert_array_equal(y[[0, 3]], weight.values[[3, 19]].astype(np.float32) * np.float32(24))
    assert not y[1:3].any()


def test_embedding_needs_ids_and_a_matrix(team: Team) -> None:
    y, program = np.zeros((1, 256), dtype=np.float32), (CInstruction * 1)()
    program[0].op, program[0].rows = Op.EMBED, Count.TOKENS
    program[0].input[:], program[0].output[:] = [-1, -1, -1, -1], [0, -1]
    with pytest.raises(NativeError, match="matrix"):
        run(team, program, [y], 1, np.zeros(1, dtype=np.int64))
