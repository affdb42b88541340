"""Blocks of GGUF files, multiplied by the op `coded_linear`.

Scales of weights become bfloat16 numbers, which is less than a file has (float16 in Q4_0 and Q4_1, the product of a
float16 number and six bits in Q4_K). A block with a minimum is scale * (code - 8) + (minimum + 8 * scale): the second part
is the same for a group of inputs, and so a product of its own, of their sums, a 32nd or 16th as large.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samovar.kernels.coded_weights import KINDS, MIDDLE
from samovar.kernels.op import Kernels
from samovar.quant.base import GATED, Activation, Dim, TensorSpec, Weights
from samovar.quant.coding import packed_bytes, packed_integers
from samovar.quant.dims import fixed
from samovar.quant.numbers.gguf_blocks import CODED
from samovar.quant.stored import Stored

REST = "rest"
"""What the sums of inputs are multiplied with, bfloat16 [out, groups]."""


class GGUFCoded(Stored):
    """Parts of one type, stored as blocks [out, blocks, bytes]."""

    def __init__(self, type: str, names: Sequence[str], kernels: Kernels) -> None:
        self.type = CODED[type]
        dims = (Dim("out"), Dim("in", self.type.size), fixed(self.type.bytes))
        super().__init__(names, (TensorSpec("weight", torch.uint8, dims),), kernels)

    def rows(self, weights: Weights, first: int, count: int, part: int) -> torch.Tensor:
        """See `Stored`."""
        codes, scale, minimum = self.type.decode(weights["weight"][first : first + count])
        values = codes.float().view(count, -1, self.type.group)
        if self.has_middle and minimum is None:
            values = values - MIDDLE
        values = values * scale[..., None] + (0 if minimum is None else minimum[..., None])
        return values.flatten(1)

    @property
    def has_middle(self) -> bool:
        """Whether codes are unsigned, of four bits."""
        return KINDS[self.type.kind].bits == 4

    def kind(self) -> str | None:
        """See `Stored`."""
        return self.type.kind

    def coded(self, weights: Weights) -> Weights | None:
        """See `Stored`."""
        codes, scale, minimum = self.type.decode(weights["weight"])
        if self.has_middle:
            packed = packed_integers(self.type.kind, codes, scale, None)
            rest = None if minimum is None else minimum + MIDDLE * scale
        else:
            packed, rest = packed_bytes(self.type.kind, codes.view(torch.uint8), scale), minimum
        return packed if rest is None else packed | {REST: rest.to(torch.bfloat16)}

    def resident_bytes(self, weights: Weights, part_rows: Sequence[int]) -> int:
        """See `QuantMethod`."""
        rest = sum(part_rows) * self.num_inputs // self.type.group * 2 if self.type.has_minimum else 0
        return super().resident_bytes(weights, part_rows) + rest

    def _rest(self, x: torch.Tensor, weights: Weights) -> torch.Tensor | None:
        """What minima add to a product, [tokens, out]."""
        rest = weights.get(REST)
        if rest is None and x.is_meta and self.type.has_minimum:
            rest = x.new_empty(sum(self.part_rows), self.num_inputs // self.type.group)
        if rest is None:
            return None
        sums = x.float().view(len(x), -1, self.type.group).sum(-1).to(x.dtype)
        return self.linear(sums, rest.to(x.dtype), None)

    def multiply(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `QuantMethod`."""
        y, rest = super().multiply(x, weights, bias), self._rest(x, weights)
        return y if rest is None else y + rest

    def add_multiply(
        self, x: torch.Tensor, weights: Weights, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """See `QuantMethod`."""
        rest = self._rest(x, weights)
        super().add_multiply(x, weights, residual, bias)
        if rest is not None:
            residual += rest

    def norm_gated_multiply(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weights: Weights,
        activation: Activation,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `QuantMethod`. The minima must be there before the activation."""
        if REST not in weights:
            return super().norm_gated_multiply(x, norm_weight, eps, weights, activation, bias)
        return self.kernels.use(GATED[activation])(self.norm_multiply(x, norm_weight, eps, weights, bias))
