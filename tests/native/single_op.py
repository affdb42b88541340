"""Runs one instruction of libsamovar on numpy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from samovar.native.abi import CInstruction, Count, CRegister, CStep, Op
from samovar.native.library import NativeError, load
from samovar.native.team import Team

Floats = NDArray[np.float32]


def usable_isas() -> list[str]:
    """Instruction sets that the library has and this machine runs; a skipped test says if there is no library."""
    try:
        return load().usable_isas()
    except NativeError:
        return []


ISAS = usable_isas() or [pytest.param("none", marks=pytest.mark.skip(reason="the CPU kernels are not built"))]


def run_op(
    team: Team,
    op: Op,
    rows: int,
    registers: Sequence[Floats],
    operands: tuple[Sequence[int], Sequence[int]],
    constants: dict[str, Any],
    step: dict[str, Any] | None = None,
) -> None:
    """`operands` are the registers in and out; `constants` has i, f, p (arrays or None); `step` names arrays and numbers."""
    program = (CInstruction * 1)()
    it = program[0]
    it.op, it.rows = op, constants.get("count", Count.TOKENS)
    it.input[:] = [*operands[0], *[-1] * (4 - len(operands[0]))]
    it.output[:] = [*operands[1], *[-1] * (2 - len(operands[1]))]
    for n, value in enumerate(constants.get("i", ())):
        it.i[n] = value
    for n, value in enumerate(constants.get("f", ())):
        it.f[n] = value
    for n, value in enumerate(constants.get("p", ())):
        it.p[n] = None if value is None else value.ctypes.data
    array = (CRegister * max(1, len(registers)))(
        *(CRegister(register.ctypes.data, register.strides[0] // 4) for register in registers)
    )
    c_step = CStep(registers=array, num_registers=len(registers))
    for name, value in (step or {}).items():
        setattr(c_step, name, value if isinstance(value, int) else value.ctypes.data)
    c_step.counts[it.rows] = rows
    team.run(program, c_step)
    team.forget()
    assert ctypes.sizeof(program)  # alive until here


def padded(rows: Floats, rng: np.random.Generator) -> Floats:
    """The same numbers in a wider register whose other columns are NaN."""
    wide = np.full((len(rows), rows.shape[1] + int(rng.integers(0, 20))), np.nan, dtype=np.float32)
    wide[:, : rows.shape[1]] = rows
    return wide
