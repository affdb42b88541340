"""compressed-tensors' pack-quantized: integers of one to eight bits, packed along the inputs into 32-bit words."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samovar.kernels.coded_weights import MIDDLE
from samovar.quant.base import Dim, TensorSpec
from samovar.quant.coded_groups import coded_bytes, coded_integers
from samovar.quant.coding import kind_of_bytes, kind_of_integers
from samovar.quant.dims import Along, EachPart, fixed, grouped
from samovar.quant.grouped import narrowed, unsigned
from samovar.quant.inputs import Inputs
from samovar.quant.numbers.packing import period, unpack, words_of
from samovar.quant.rounded import Rounded
from samovar.quant.scheme import Layer


@dataclass(frozen=True, slots=True)
class PackedIntScheme:
    """`group_size` -1: one scale a row. `has_g_idx`: files of older versions with act-order."""

    bits: int
    group_size: int
    is_symmetric: bool = True
    has_g_idx: bool = False
    inputs: Inputs | None = None

    def method(self, layer: Layer) -> PackedInt:
        """See `Scheme`."""
        return PackedInt(self, layer)


class PackedInt(Rounded):
    """`weight_packed` stays as it is stored; zero points, which are packed along the outputs, become bytes."""

    def __init__(self, scheme: PackedIntScheme, layer: Layer) -> None:
        self.scheme = scheme
        values, words = period(scheme.bits)
        groups = grouped(scheme.group_size)
        tensors = [
            TensorSpec("weight_packed", torch.int32, (Dim("out"), Along("in", values, words))),
            TensorSpec("weight_scale", torch.float32, (Dim("out"), groups)),
        ]
        if layer.has("weight_shape", otherwise=True):
            tensors.append(EachPart("weight_shape", torch.int64, (fixed(2),)))
        if not scheme.is_symmetric:
            packed = Along("out", values, words, is_ragged=True)
            tensors.append(TensorSpec("weight_zero_point", torch.int32, (packed, groups)))
        if layer.has("weight_g_idx", otherwise=scheme.has_g_idx):
            tensors.append(EachPart("weight_g_idx", torch.int32, (Dim("in"),)))
        super().__init__(layer.names, tensors, layer.kernels, inputs=scheme.inputs, group_size=scheme.group_size)

    def repack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Stored`."""
        kept = {"weight_packed": weights["weight_packed"], "scale": narrowed(weights["weight_scale"])}
        if "weight_zero_point" in weights:
            kept["zero"] = unsigned(self._zeros(weights["weight_zero_point"]).t())
        if "weight_g_idx" in weights:
            order = self.ordered(weights["weight_g_idx"], kept["scale"].shape[1])
            if order is not None:
                kept["g_idx"] = order
        return kept | {name: tensor for name, tensor in weights.items() if name == "bias"}

    def _zeros(self, packed: torch.Tensor) -> torch.Tensor:
        """[words, groups] -> [out, groups]; every part begins with a word of its own."""
        words = [words_of(self.scheme.bits, rows) for rows in self.part_rows]
        parts = zip(torch.split(packed, words), self.part_rows, strict=True)
        return torch.cat([unpack(part, self.scheme.bits, rows, 0) for part, rows in parts])

    def kind(self) -> str | None:
        """See `Stored`."""
        if self.inputs is not None:
            return None
        if self.scheme.bits > 4:
            return kind_of_bytes("int8", self.group_size, self.num_inputs)
        return kind_of_integers(self.group_size, self.num_inputs, has_zero=not self.scheme.is_symmetric)

    def coded(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """See `Stored`. Symmetric codes of fewer than four bits are moved to where those of four have their middle."""
        kind = self.kind()
        if kind is None:
            return None
        if self.scheme.bits > 4:
            return coded_bytes(self, kind, weights)
        codes = unpack(weights["weight_packed"], self.scheme.bits, self.num_inputs)
        if self.scheme.is_symmetric:
            codes = codes + (MIDDLE - (1 << (self.scheme.bits - 1)))
        return coded_integers(self, kind, codes, weights)

    def numbers(self, weights: dict[str, torch.Tensor], first: int, count: int) -> torch.Tensor:
        """See `Grouped`. Codes are unsigned, as are zero points; without those the middle is zero."""
        codes = unpack(weights["weight_packed"][first : first + count], self.scheme.bits, self.num_inputs).float()
        return codes if "zero" in weights else codes.sub_(1 << (self.scheme.bits - 1))
