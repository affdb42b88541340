"""What formats of checkpoints share: tensors kept as they are stored, and a product through rows of weights made anew.

A row block is dequantized, multiplied and forgotten, so no copy of the weights in floats exists.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from samovar.kernels.linear import linear
from samovar.kernels.logits import logits
from samovar.kernels.op import Kernels
from samovar.quant.base import FeatureAxis, QuantMethod, TensorSpec, Weights
from samovar.quant.dims import EachPart, length

BLOCK_WEIGHTS = 1 << 22
"""Weights that are dequantized together, about."""
BLOCK_ROWS = 128
"""Rows of a block are a multiple of this, counted from the first of their part."""


class Decoded(QuantMethod):
    """One layer, which joins the checkpoint's linears `names`. Subclasses say what is stored and what a row of it is."""

    may_store_zero_bias = True

    def __init__(self, names: Sequence[str], tensors: Sequence[TensorSpec], kernels: Kernels) -> None:
        super().__init__(kernels)
        self.names, self.tensors = tuple(names), tuple(tensors)
        self.linear = kernels.use(linear)
        self.part_rows: list[int] = []
        self.num_inputs = 0

    def rows(self, weights: Weights, first: int, count: int, part: int) -> torch.Tensor:
        """Rows of the weight, float32 [count, in], all of one part."""
        raise NotImplementedError(f"{type(self).__name__} cannot be dequantized")

    def given(self, x: torch.Tensor, weights: Weights, part: int) -> torch.Tensor:
        """What the weights of `part` are multiplied with: x, unless the format rounds it."""
        return x

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> Weights:
        """See `QuantMethod`. What rounds up does so for each part."""
        self.part_rows = list(part_rows) if features["part"] == len(part_rows) else [sum(part_rows)]
        self.num_inputs = features["in"]
        return {spec.name: empty(*self._shape(spec, features), dtype=spec.dtype) for spec in specs}

    def _shape(self, spec: TensorSpec, features: dict[FeatureAxis, int]) -> list[int]:
        what = f"{self.names[0]}.{spec.name}"
        many = [len(self.part_rows)] if isinstance(spec, EachPart) and len(self.part_rows) > 1 else []
        return many + [
            sum(length(dim, {**features, "out": rows}, what) for rows in self.part_rows)
            if dim.axis == "out"
            else length(dim, features, what)
            for dim in spec.dims
        ]

    def part_of(self, weights: Weights, spec: TensorSpec, part: int, first_row: int, rows: int) -> torch.Tensor:
        """See `QuantMethod`."""
        target = weights[spec.name]
        if isinstance(spec, EachPart):
            return target[part] if len(self.part_rows) > 1 else target
        for index, dim in enumerate(spec.dims):
            if dim.axis == "out":
                starts = [length(dim, {"out": r}, spec.name) for r in [*self.part_rows[:part], rows]]
                target = target.narrow(index, sum(starts[:-1]), starts[-1])
            elif dim.axis == "part":
                target = target.narrow(index, part, 1)
        return target

    def blocks(self) -> Iterator[tuple[int, int, int]]:
        """(part, first row, rows) of the blocks in which the weight is made."""
        step = max(1, BLOCK_WEIGHTS // max(1, self.num_inputs) // BLOCK_ROWS) * BLOCK_ROWS
        start = 0
        for part, rows in enumerate(self.part_rows):
            for first in range(start, start + rows, step):
                yield part, first, min(step, start + rows - first)
            start += rows

    def dequantize(self, weights: Weights) -> torch.Tensor:
        """The whole weight, float32 [out, in]."""
        return torch.cat([self.rows(weights, first, count, part) for part, first, count in self.blocks()])

    def multiply(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `QuantMethod`. Rows are rounded to x's dtype before they are multiplied.

        An x without memory only names the kernels that will run: the weights need not be loaded for that.
        """
        y = x.new_empty(len(x), sum(self.part_rows))
        current, given = -1, x
        for part, first, count in self.blocks():
            if x.is_meta:
                self.linear(x, x.new_empty(count, self.num_inputs))
                continue
            if part != current:
                current, given = part, self.given(x, weights, part)
            rows = slice(first, first + count)
            weight = self.rows(weights, first, count, part).to(x.dtype)
            y[:, rows] = self.linear(given, weight, None if bias is None else bias[rows])
        return y

    def logits(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """See `QuantMethod`."""
        if x.is_meta:
            return self.multiply(x, weights).float()
        y = x.new_empty(len(x), sum(self.part_rows), dtype=torch.float32)
        given, head = self.given(x, weights, 0), self.kernels.use(logits)
        for part, first, count in self.blocks():
            y[:, first : first + count] = head(given, self.rows(weights, first, count, part).to(x.dtype))
        return y
