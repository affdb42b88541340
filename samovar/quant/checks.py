"""Checks: products of loaded weights beside what the weights mean, made once at start on the device that serves them.

A kernel that is right in an interpreter and at small sizes may be wrong on a chip: registers are read late, a tile is
taken that no test had. So every kind and shape of a model is multiplied with random inputs, few and many, and compared
with plain sums in float32. What may differ is bounded by the arithmetic, not by experience.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from samovar.quant.bounds import Expected

TOKENS = (1, 8, 16, 33, 65, 128)
"""Numbers of tokens at which kernels change."""
Use = Literal["plain", "normed", "added", "silu", "gelu"]
"""How a model multiplies: alone, behind a norm, added to a residual, or gated."""
ROWS = 512
"""Rows that are compared at either end of a weight; kernels compute all."""


@dataclass(frozen=True, slots=True)
class Check:
    """One product: `run` of x [tokens, num_inputs] is [tokens, num_rows], of which `expect` gives the rows in a slice.

    `refuse` leaves the kernel out from now on for so many tokens, and says whether it could. `key` is equal for products
    that run the same code.
    """

    op: str
    what: str
    use: Use
    num_rows: int
    num_inputs: int
    run: Callable[[torch.Tensor], torch.Tensor]
    expect: Callable[[torch.Tensor, slice], Expected]
    refuse: Callable[[int], bool] = lambda tokens: False
    is_even: bool = False
    """Whether inputs should be whole steps of which each 32 have the same, as integers of eight bits hold them."""

    @property
    def key(self) -> tuple[object, ...]:
        """See the class."""
        return self.op, self.what, self.use, self.num_rows, self.num_inputs

    def __str__(self) -> str:
        return f"{self.op} of {self.what} [{self.num_rows}, {self.num_inputs}]"

    def inputs(self, tokens: int, device: torch.device) -> torch.Tensor:
        """Random inputs [tokens, num_inputs], always the same."""
        generator = torch.Generator(device).manual_seed(self.num_inputs)
        if self.is_even:
            steps = torch.randint(-127, 128, (tokens, self.num_inputs), generator=generator, device=device)
            steps[:, ::32] = 127
            return steps / 128
        return torch.randn(tokens, self.num_inputs, generator=generator, device=device)

    def difference(self, x: torch.Tensor) -> str | None:
        """How far off the product is, if that is too far; None if it is right."""
        got = self.run(x)
        for rows in ends(self.num_rows):
            values, errors = self.expect(x, rows)
            off = (got[:, rows].float() - values).abs()
            # Not `>`: what is no number is wrong, too.
            if not bool((off <= errors).all()):
                return f"largest error {float(off.max()):.3g} where {float(errors.mean()):.2g} is allowed"
        return None


def ends(rows: int) -> list[slice]:
    """The first and the last rows, counted from whole bricks and blocks."""
    if rows <= 2 * ROWS:
        return [slice(0, rows)]
    return [slice(0, ROWS), slice((rows - ROWS) // 128 * 128, rows)]
