"""GPTQ: integers of 2, 3, 4 or 8 bits, packed along the inputs; scales and zero points for groups of inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samovar.quant.base import Dim, TensorSpec
from samovar.quant.coded_groups import coded_bytes, coded_integers
from samovar.quant.coding import kind_of_bytes, kind_of_integers
from samovar.quant.dims import Along, EachPart, grouped
from samovar.quant.grouped import Grouped, transposed, unsigned
from samovar.quant.numbers.packing import period, unpack
from samovar.quant.scheme import Layer


@dataclass(frozen=True, slots=True)
class GPTQScheme:
    """`adds_one`: files of version 1 store zero points less one, modulo their range. `g_idx`: whether files have one.

    `has_order`: it says more than the group size does. `is_symmetric`: all zero points are the middle.
    """

    bits: int
    group_size: int
    adds_one: bool = True
    g_idx: bool = True
    has_order: bool = False
    is_symmetric: bool = False

    def method(self, layer: Layer) -> GPTQ:
        """See `Scheme`."""
        return GPTQ(self, layer)


class GPTQ(Grouped):
    """`qweight` stays as it is stored; zero points become bytes. With act-order, `g_idx` says the group of each input."""

    def __init__(self, scheme: GPTQScheme, layer: Layer) -> None:
        self.scheme = scheme
        values, words = period(scheme.bits)
        groups = grouped(scheme.group_size)
        tensors = [
            TensorSpec("qweight", torch.int32, (Along("in", values, words), Dim("out"))),
            TensorSpec("qzeros", torch.int32, (groups, Along("out", values, words))),
            TensorSpec("scales", torch.float32, (groups, Dim("out"))),
        ]
        if layer.has("g_idx", otherwise=scheme.g_idx):
            tensors.append(EachPart("g_idx", torch.int32, (Dim("in"),)))
        super().__init__(layer.names, tensors, layer.kernels, group_size=scheme.group_size)

    def repack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Stored`."""
        bits, out = self.scheme.bits, sum(self.part_rows)
        zeros = unpack(weights.pop("qzeros"), bits, out)
        if self.scheme.adds_one:
            zeros = (zeros + 1) & ((1 << bits) - 1)
        kept = {**weights, "scale": transposed(weights["scales"]), "zero": unsigned(zeros)}
        del kept["scales"]
        if "g_idx" in kept:
            order = self.ordered(kept.pop("g_idx"), len(zeros))
            if order is not None:
                kept["g_idx"] = order
        return kept

    def kind(self) -> str | None:
        """See `Stored`."""
        if self.scheme.bits > 4:
            return kind_of_bytes("int8", self.group_size, self.num_inputs)
        return kind_of_integers(self.group_size, self.num_inputs, has_zero=True)

    def coded(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """See `Stored`. Act-order brings the inputs of a group together, and those of each product likewise."""
        kind = self.kind()
        if kind is None:
            return None
        if self.scheme.bits > 4:
            return coded_bytes(self, kind, weights)
        codes = unpack(weights["qweight"], self.scheme.bits, self.num_inputs, 0).t()
        return coded_integers(self, kind, codes, weights)

    def numbers(self, weights: dict[str, torch.Tensor], first: int, count: int) -> torch.Tensor:
        """See `Grouped`."""
        words = weights["qweight"][:, first : first + count]
        return unpack(words, self.scheme.bits, self.num_inputs, 0).t().float()
