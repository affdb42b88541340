"""Products: what the CPU library computes with packed weights, one instruction at a time."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from samovar.native.abi import PANEL, CInstruction, CMatrix, Count, CRegister, CStep, Op
from samovar.native.pages import Pages
from samovar.native.team import Team
from samovar.quant.bounds import Expected, product
from samovar.quant.checks import Check

CHECKED_ROWS = 4 * PANEL
"""Rows of a matrix that a check multiplies."""


class Products:
    """Runs single instructions on the team that `open_team` gives. Models that cannot be lowered are computed with it.

    `pages` is the memory of the weights.
    """

    def __init__(self, open_team: Callable[[], Team], num_threads: int = 1) -> None:
        self._open_team, self.num_threads, self.pages = open_team, num_threads, Pages()

    def linear(
        self, x: torch.Tensor, matrices: ctypes.Array[CMatrix], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, in] times the transposed `matrices`, which stand side by side, plus bias; in x's dtype."""
        given = x.detach().to(torch.float32).contiguous()
        y = torch.empty(len(x), sum(matrix.rows for matrix in matrices))
        instruction = CInstruction(op=Op.LINEAR, rows=Count.TOKENS)
        instruction.input[:], instruction.output[:] = [0, -1, -1, -1], [1, -1]
        instruction.i[0], instruction.i[2] = len(matrices), given.shape[1]
        instruction.p[0] = ctypes.addressof(matrices)
        if bias is not None:
            instruction.p[1] = bias.data_ptr()
        self._run(instruction, [given, y], CStep(), len(given))
        return y.to(x.dtype)

    def look_up(self, token_ids: torch.Tensor, matrices: ctypes.Array[CMatrix]) -> torch.Tensor:
        """Rows of the one matrix, float32 [tokens, in]. The ids must be inside it."""
        ids = token_ids.to(torch.int64).contiguous()
        y = torch.empty(len(ids), matrices[0].cols)
        instruction = CInstruction(op=Op.EMBED, rows=Count.TOKENS)
        instruction.input[:], instruction.output[:] = [-1] * 4, [0, -1]
        instruction.p[0], instruction.f[0] = ctypes.addressof(matrices), 1.0
        self._run(instruction, [y], CStep(token_ids=ids.data_ptr()), len(ids))
        return y

    def check(self, name: str, matrix: CMatrix) -> Check:
        """Products of the first rows of a matrix in blocks of the format `name`, beside what those rows decode to."""
        few = (CMatrix * 1)(CMatrix.from_buffer_copy(matrix))
        few[0].rows = min(matrix.rows, CHECKED_ROWS)

        def expect(x: torch.Tensor, rows: slice) -> Expected:
            weight = self.look_up(torch.arange(few[0].rows), few)
            values, errors = product(x.float(), weight[rows], x.dtype)
            return Expected(
                values, 2 * errors
            )  # nothing can take this kernel's place: only what is surely wrong counts

        def run(x: torch.Tensor) -> torch.Tensor:
            return self.linear(x, few)

        return Check("linear", name, "plain", few[0].rows, matrix.cols, run, expect, is_even=True)

    def _run(self, instruction: CInstruction, values: list[torch.Tensor], step: CStep, tokens: int) -> None:
        if tokens == 0:
            return
        team = self._open_team()
        registers = (CRegister * len(values))(*[CRegister(value.data_ptr(), value.stride(0)) for value in values])
        step.registers, step.num_registers = registers, len(values)
        step.counts[Count.TOKENS] = tokens
        team.run((CInstruction * 1)(instruction), step)
        team.forget()
