"""Runs LINEAR, GATED_LINEAR and EMBED of libsamovar, and what their results are compared with."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samovar.native.abi import GROUP, CInstruction, CMatrix, Count, CRegister, CStep, Format, Op
from samovar.native.matrix import Matrix
from samovar.native.team import Team
from tests.native.random_blocks import PLAIN, expected_values, random_source

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
EPSILON = float(np.finfo(np.float32).eps)


@dataclass
class Weight:
    """A packed weight and the numbers it stands for."""

    format: Format
    rows: int
    cols: int
    seed: int = 0
    matrix: Matrix = field(init=False)
    values: Doubles = field(init=False)

    def __post_init__(self) -> None:
        source = random_source(self.format, self.rows, self.cols, np.random.default_rng(self.seed + 17 * self.rows))
        self.matrix = Matrix(self.format, self.rows, self.cols).pack(source)
        self.values = expected_values(self.format, source, self.cols).astype(np.float64)


@dataclass
class Options:
    """What an instruction adds to the product."""

    bias: Floats | None = None
    norm: Floats | None = None
    epsilon: float = 1e-5
    adds: bool = False
    activation: int | None = None
    """None: LINEAR; else GATED_LINEAR's."""


def run_linear(team: Team, x: Floats, weights: list[Weight], y: Floats, options: Options | None = None) -> None:
    """One instruction on rows of x (which may be wider than its columns) into y, whose strides may be wider too."""
    options = options or Options()
    gated = options.activation is not None
    matrices = (CMatrix * len(weights))(*(weight.matrix.c for weight in weights))
    program = (CInstruction * 1)()
    it = program[0]
    it.op, it.rows = Op.GATED_LINEAR if gated else Op.LINEAR, Count.TOKENS
    it.input[:], it.output[:] = [0, -1, -1, -1], [1, -1]
    it.i[:5] = [
        len(weights),
        int(options.adds),
        weights[0].cols,
        int(options.norm is not None),
        options.activation or 0,
    ]
    it.f[0] = options.epsilon
    it.p[0] = ctypes.addressof(matrices)
    it.p[1] = None if options.bias is None else options.bias.ctypes.data
    it.p[2] = None if options.norm is None else options.norm.ctypes.data
    run(team, program, [x, y], len(x))


def run(
    team: Team, program: Any, registers: list[Floats], rows: int, token_ids: NDArray[np.int64] | None = None
) -> None:
    """Instructions over registers given as 2-d arrays."""
    array = (CRegister * len(registers))(
        *(CRegister(register.ctypes.data, register.strides[0] // 4) for register in registers)
    )
    step = CStep(registers=array, num_registers=len(registers))
    step.counts[Count.TOKENS] = rows
    if token_ids is not None:
        step.token_ids = token_ids.ctypes.data
    team.run(program, step)
    team.forget()


def quantized(x: Floats) -> tuple[Doubles, Doubles]:
    """x as int8 times a scale for 32, and the steps between codes, both [rows, cols]."""
    rows, cols = x.shape
    padded = np.zeros((rows, -(-cols // GROUP) * GROUP), dtype=np.float32)
    padded[:, :cols] = x
    groups = padded.reshape(rows, -1, GROUP)
    most = np.abs(groups).max(axis=2, keepdims=True)
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.where(most >= np.float32(2.0**-120), np.float32(127) / most, np.float32(0))
    scales = np.where(inverse > 0, most / np.float32(127), np.float32(0)).astype(np.float64)
    codes = np.rint(groups * inverse).astype(np.float64)
    steps = np.broadcast_to(scales, groups.shape)
    return (codes * scales).reshape(rows, -1)[:, :cols], steps.reshape(rows, -1)[:, :cols]


def in_groups(weight: Weight) -> Doubles:
    """For every weight the largest magnitude of its group of 32: what a product is made of before it cancels."""
    padded = np.zeros((weight.rows, -(-weight.cols // GROUP) * GROUP))
    padded[:, : weight.cols] = np.abs(weight.values)
    most = padded.reshape(weight.rows, -1, GROUP).max(axis=2, keepdims=True)
    return np.broadcast_to(most, (*most.shape[:2], GROUP)).reshape(weight.rows, -1)[:, : weight.cols]


def exact_error(weight: Weight, x: Doubles) -> Doubles:
    """Bound of what float32 sums may lose: an epsilon for every term and every group's addition.

    A minimum or an offset is at most twice the largest weight of its group and is subtracted from as much again.
    """
    terms = weight.cols if weight.format in PLAIN else weight.cols // GROUP
    return EPSILON * (terms + 12) * (np.abs(x) @ (4 * in_groups(weight)).T) + 1e-30


def wide_error(weight: Weight, x: Doubles) -> Doubles:
    """Bound of products in bfloat16: half of 2^-8 for each factor, and float32 sums. I8: of int8 with one scale a row."""
    if weight.format is Format.I8:
        steps = np.abs(x).max(axis=1, keepdims=True) / 127
        return 0.5001 * steps * np.abs(weight.values).sum(axis=1) + exact_error(weight, x)
    return 2.0**-8 * 1.01 * (np.abs(x) @ np.abs(weight.values).T) + exact_error(weight, x)


def check_product(weight: Weight, x: Floats, y: Doubles) -> None:
    """y [rows, outputs] is x times the weight by one of the ways that libsamovar may choose for so many rows.

    Four rows or fewer of a quantized weight are always multiplied as int8, whose products are known to float32's last bits.
    More may go by bfloat16, and plain weights in float32 or bfloat16.
    """
    wide_x = x.astype(np.float64)
    straight = np.abs(y - wide_x @ weight.values.T)
    if weight.format in PLAIN:
        exact = weight.format is Format.F32 or len(x) <= 1
        bound = exact_error(weight, wide_x) if exact else wide_error(weight, wide_x)
        assert (straight <= bound).all(), f"off by {(straight / bound).max():.3g} bounds"
        return
    x8, steps = quantized(x)
    by_codes = np.abs(y - x8 @ weight.values.T) / exact_error(weight, x8)
    if len(x) <= 4 or (by_codes <= 1).all():
        assert (by_codes <= 1).all(), f"off by {by_codes.max():.3g} bounds"
        rounding = 0.5001 * (steps @ np.abs(weight.values).T) + exact_error(weight, wide_x)
        assert (straight <= rounding).all()
    else:
        by_wide = straight / wide_error(weight, wide_x)
        assert (by_wide <= 1).all(), f"off by {by_codes.max():.3g} bounds of int8, {by_wide.max():.3g} of bfloat16"
