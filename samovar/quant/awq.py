"""AWQ: integers of four bits, packed along the outputs in an order of its own (the GEMM version of AutoAWQ)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samovar.quant.base import Dim, TensorSpec
from samovar.quant.coding import kind_of_integers, packed_integers
from samovar.quant.dims import grouped
from samovar.quant.grouped import Grouped, transposed, unsigned
from samovar.quant.numbers.packing import unpack_awq
from samovar.quant.scheme import Layer

VALUES_IN_WORD = 8


@dataclass(frozen=True, slots=True)
class AWQScheme:
    """Zero points are stored as they are, also where all of them are eight."""

    group_size: int

    def method(self, layer: Layer) -> AWQ:
        """See `Scheme`."""
        return AWQ(self, layer)


class AWQ(Grouped):
    """`qweight` stays as it is stored; zero points become bytes."""

    def __init__(self, scheme: AWQScheme, layer: Layer) -> None:
        groups, packed = grouped(scheme.group_size), Dim("out", VALUES_IN_WORD)
        tensors = (
            TensorSpec("qweight", torch.int32, (Dim("in"), packed)),
            TensorSpec("qzeros", torch.int32, (groups, packed)),
            TensorSpec("scales", torch.float32, (groups, Dim("out"))),
        )
        super().__init__(layer.names, tensors, layer.kernels, group_size=scheme.group_size)

    def repack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Stored`."""
        zeros, scales = unpack_awq(weights.pop("qzeros")), weights.pop("scales")
        return {**weights, "scale": transposed(scales), "zero": unsigned(zeros)}

    def kind(self) -> str | None:
        """See `Stored`."""
        return kind_of_integers(self.group_size, self.num_inputs, has_zero=True)

    def coded(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """See `Stored`."""
        kind = self.kind()
        if kind is None:
            return None
        codes = unpack_awq(weights["qweight"]).t()
        return packed_integers(kind, codes, weights["scale"], weights["zero"])

    def numbers(self, weights: dict[str, torch.Tensor], first: int, count: int) -> torch.Tensor:
        """See `Grouped`."""
        words = weights["qweight"][:, first // VALUES_IN_WORD : (first + count) // VALUES_IN_WORD]
        return unpack_awq(words).t().float()
