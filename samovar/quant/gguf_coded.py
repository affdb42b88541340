"""Blocks of four bits of GGUF files, multiplied by the op `coded_linear`.

Scales of 32 weights become bfloat16 numbers, which is less than a file has (float16 in Q4_0 and Q4_1, the product of a
float16 number and six bits in Q4_K). A block with a minimum is scale * (code - 8) + (minimum + 8 * scale): the second part
is the same for 32 inputs, and so a product of its own, of their sums, 1/32 as large.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samovar.kernels.op import Kernels
from samovar.quant.base import GATED, Activation, Dim, TensorSpec, Weights
from samovar.quant.coded import packed_integers
from samovar.quant.dims import fixed
from samovar.quant.numbers.gguf_blocks import CODED
from samovar.quant.stored import Stored

GROUP, KIND, MIDDLE = 32, "int4_32", 8
REST = "rest"
"""What the sums of inputs are multiplied with, bfloat16 [out, in / 32]."""


class GGUFCoded(Stored):
    """Parts of one type, stored as blocks [out, blocks, bytes]."""

    def __init__(self, type: str, names: Sequence[str], kernels: Kernels) -> None:
        self.type = CODED[type]
        dims = (Dim("out"), Dim("in", self.type.size), fixed(self.type.bytes))
        super().__init__(names, (TensorSpec("weight", torch.uint8, dims),), kernels)

    def rows(self, weights: Weights, first: int, count: int, part: int) -> torch.Tensor:
        """See `Stored`."""
        codes, scale, minimum = self.type.decode(weights["weight"][first : first + count])
        values = codes.float().view(count, -1, GROUP) - (MIDDLE if minimum is None else 0)
        values = values * scale[..., None] + (0 if minimum is None else minimum[..., None])
        return values.flatten(1)

    def kind(self) -> str | None:
        """See `Stored`."""
        return KIND

    def coded(self, weights: Weights) -> Weights | None:
        """See `Stored`."""
        codes, scale, minimum = self.type.decode(weights["weight"])
        packed = packed_integers(KIND, codes, scale, None)
        return packed if minimum is None else packed | {REST: (minimum + MIDDLE * scale).to(torch.bfloat16)}

    def resident_bytes(self, weights: Weights, part_rows: Sequence[int]) -> int:
        """See `QuantMethod`."""
        rest = 0 if self.type is CODED["Q4_0"] else sum(part_rows) * self.num_inputs // GROUP * 2
        return super().resident_bytes(weights, part_rows) + rest

    def _rest(self, x: torch.Tensor, weights: Weights) -> torch.Tensor | None:
        """What minima add to a product, [tokens, out]."""
        rest = weights.get(REST)
        if rest is None and x.is_meta and self.type is not CODED["Q4_0"]:
            rest = x.new_empty(sum(self.part_rows), self.num_inputs // GROUP)
        if rest is None:
            return None
        sums = x.float().view(len(x), -1, GROUP).sum(-1).to(x.dtype)
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
