"""Stored weights of four bits as the op `coded_linear` wants them, for targets that have a kernel for it.

A format says of which kind it is and gives codes and scales once; its products are single ops from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from samovar.kernels.coded_gated_linear import coded_gated_linear
from samovar.kernels.coded_linear import coded_linear
from samovar.kernels.coded_linear.tiles import refuse
from samovar.kernels.coded_linear_add import coded_linear_add
from samovar.kernels.coded_weights import BRICK_ROWS, KINDS, decode, shape_of
from samovar.kernels.op import Kernels
from samovar.quant.bounds import Expected, gated, product
from samovar.quant.checks import Check, Use
from samovar.quant.coding import CODES, ROW_SCALE, SCALE, Weights


class Packed(NamedTuple):
    """What the ops take of a weight, in their order."""

    codes: torch.Tensor
    scale: torch.Tensor
    row_scale: torch.Tensor
    kind: str


class CodedProducts:
    """The ops for weights of one kind; see `has_kernel`."""

    def __init__(self, kind: str, kernels: Kernels) -> None:
        self.kind = kind
        self.linear = kernels.use(coded_linear)
        self.add: Callable[..., None] = kernels.use(coded_linear_add)
        self.gated = kernels.use(coded_gated_linear)

    def of(self, weights: Weights) -> Packed | None:
        """The packed weight among a layer's tensors, once it was loaded."""
        if CODES not in weights:
            return None
        return Packed(weights[CODES], weights[SCALE], weights[ROW_SCALE], self.kind)

    def shapes(self, rows: int, inputs: int) -> dict[str, tuple[int, ...]]:
        """What a weight [rows, inputs] becomes."""
        row_bricks, input_bricks = shape_of(rows, inputs, self.kind)
        words = BRICK_ROWS * KINDS[self.kind].words
        return {CODES: (row_bricks, input_bricks, 128), SCALE: (row_bricks, input_bricks, words), ROW_SCALE: (rows,)}

    def num_bytes(self, rows: int, inputs: int) -> int:
        """Memory that the weight takes: everything is of 32 bits."""
        return 4 * sum(torch.Size(shape).numel() for shape in self.shapes(rows, inputs).values())

    def without_memory(self, rows: int, inputs: int) -> Packed:
        """A weight that kernels are compiled for before it is loaded."""
        shapes = self.shapes(rows, inputs)
        codes, scale = (torch.empty(shapes[name], dtype=torch.int32, device="meta") for name in (CODES, SCALE))
        return Packed(codes, scale, torch.empty(rows, device="meta"), self.kind)

    def check(self, weight: Packed, inputs: int, use: Use) -> Check:
        """The product that the model makes with `weight`, beside plain sums of what it means."""
        ops = {"added": coded_linear_add.name, "silu": coded_gated_linear.name, "gelu": coded_gated_linear.name}
        parts = 2 if use in ("silu", "gelu") else 1
        rows = len(weight.row_scale) // parts

        def run(x: torch.Tensor) -> torch.Tensor:
            if use == "silu" or use == "gelu":
                return self.gated(x, *weight, use, None)
            if use != "added":
                return self.linear(x, *weight, None)
            y = x.new_zeros(len(x), rows)
            self.add(x, *weight, y, None)
            return y

        def expect(x: torch.Tensor, some: slice) -> Expected:
            found = [
                product(x.float(), rows_of(weight, inputs, some.start + part * rows, some.stop - some.start), x.dtype)
                for part in range(parts)
            ]
            return found[0] if parts == 1 else gated(found[0], found[1], use, x.dtype)

        def leave_out(tokens: int) -> bool:
            # Where gate and up do not meet in one program, the plain product of both is what ran.
            found = [refuse(self.kind, rows * parts // joined, inputs, joined, tokens) for joined in {parts, 1}]
            return any(found)

        op = ops.get(use, coded_linear.name)
        return Check(op, self.kind, use, rows, inputs, run, expect, leave_out)


def rows_of(weight: Packed, inputs: int, first: int, count: int) -> torch.Tensor:
    """Rows of a packed weight as kernels see them, float32 [count, inputs]: in bfloat16, times the scales of the rows.

    `first` must be a multiple of 16.
    """
    bricks = slice(first // BRICK_ROWS, -(-(first + count) // BRICK_ROWS))
    scale = weight.row_scale[first : first + count].float()
    ones = torch.ones_like(scale)
    plain = decode(weight.codes[bricks], weight.scale[bricks], weight.kind, count, inputs, ones)
    return plain.to(torch.bfloat16).float() * scale[:, None]


def has_kernel(kernels: Kernels) -> bool:
    """Whether something better than the reference multiplies packed weights on this target."""
    if kernels.target.device != "cuda":
        return False
    kernels.use(coded_linear)
    return kernels.routes[coded_linear.name].chosen != "reference"
