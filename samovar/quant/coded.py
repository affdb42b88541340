"""Stored weights of four bits as the op `coded_linear` wants them, for targets that have a kernel for it.

A format says of which kind it is and gives codes and scales once; its products are single ops from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from samovar.kernels.coded_gated_linear import coded_gated_linear
from samovar.kernels.coded_linear import coded_linear
from samovar.kernels.coded_linear_add import coded_linear_add
from samovar.kernels.coded_weights import BRICK_ROWS, KINDS, pack_codes, pack_scale, shape_of
from samovar.kernels.op import Kernels

CODES, SCALE, ROW_SCALE = "codes", "scale_words", "row_scale"
"""What the packed tensors are called among a layer's weights."""
Weights = dict[str, torch.Tensor]


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
        row_bricks, input_bricks = shape_of(rows, inputs)
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


def has_kernel(kernels: Kernels) -> bool:
    """Whether something better than the reference multiplies packed weights on this target."""
    if kernels.target.device != "cuda":
        return False
    kernels.use(coded_linear)
    return kernels.routes[coded_linear.name].chosen != "reference"


def kind_of_integers(group_size: int, num_inputs: int, *, has_zero: bool) -> str | None:
    """The kind of four-bit integers with a scale for `group_size` inputs, -1 for all; None if there is none."""
    end = "_zero" if has_zero else ""
    if group_size == 32:
        return f"int4_32{end}"
    if group_size == -1 or group_size == num_inputs or (group_size > 0 and group_size % 64 == 0):
        return f"int4_64{end}"
    return None


def packed_integers(kind: str, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> Weights:
    """Codes [rows, inputs], scales and zero points [rows, groups] -> what a layer keeps. Scales become bfloat16."""
    if KINDS[kind].group == 64:
        bricks = -(-codes.shape[1] // 64)
        scale = _for_each_brick(scale, bricks)
        zero = None if zero is None else _for_each_brick(zero, bricks)
    row_scale = torch.ones(len(codes), device=codes.device)
    return {CODES: pack_codes(codes, kind), SCALE: pack_scale(scale, kind, zero), ROW_SCALE: row_scale}


def _for_each_brick(groups: torch.Tensor, bricks: int) -> torch.Tensor:
    """[rows, groups] of a multiple of 64 inputs, or of all -> [rows, bricks]."""
    if groups.shape[1] == 1:
        return groups.expand(-1, bricks)
    return groups.repeat_interleave(bricks // groups.shape[1], 1)
