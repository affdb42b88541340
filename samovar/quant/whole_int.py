"""Integers of a byte each: int8 checkpoints of compressed-tensors, bitsandbytes and TorchAO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from samovar.quant.base import Dim, TensorSpec
from samovar.quant.coded_groups import coded_bytes
from samovar.quant.coding import kind_of_bytes
from samovar.quant.dims import PER_PART, fixed, grouped
from samovar.quant.grouped import narrowed
from samovar.quant.inputs import Inputs
from samovar.quant.rounded import Rounded, input_tensors
from samovar.quant.scaled import fits
from samovar.quant.scheme import Layer

Strategy = Literal["tensor", "row", "column", "group"]
"""One scale a tensor, one a row as [out] or as [out, 1], or one for each group of a row."""


@dataclass(frozen=True, slots=True)
class IntScheme:
    """int8 weights and how their tensors are called; `divisor` divides every scale."""

    strategy: Strategy
    group_size: int = -1
    weight: str = "weight"
    scale: str = "weight_scale"
    zero: str | None = None
    unused: tuple[str, ...] = ()
    """Further tensors with one byte, which say nothing of interest."""
    divisor: float = 1.0
    inputs: Inputs | None = None

    def method(self, layer: Layer) -> WholeInt:
        """See `Scheme`."""
        return WholeInt(self, layer)


class WholeInt(Rounded):
    """The weight stays as it is stored."""

    def __init__(self, scheme: IntScheme, layer: Layer) -> None:
        self.scheme = scheme
        dims = {
            "tensor": PER_PART,
            "row": (Dim("out"),),
            "column": (Dim("out"), fixed(1)),
            "group": (Dim("out"), grouped(scheme.group_size)),
        }[scheme.strategy]
        tensors = [TensorSpec(scheme.weight, torch.int8), TensorSpec(scheme.scale, torch.float32, dims)]
        if scheme.zero is not None:
            tensors.append(TensorSpec(scheme.zero, torch.int8, dims))
        tensors += [TensorSpec(n, torch.uint8, PER_PART) for n in scheme.unused if layer.has(n, otherwise=True)]
        tensors += input_tensors(scheme.inputs, layer)
        super().__init__(
            layer.names, tensors, layer.kernels, inputs=scheme.inputs, group_size=scheme.group_size,
            is_small=scheme.strategy != "group" and fits(scheme.inputs, "int8", None),
        )  # fmt: skip

    def repack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Stored`."""
        scale = self.column(weights.pop(self.scheme.scale))
        if self.scheme.divisor != 1:
            scale = scale / self.scheme.divisor
        kept = {"scale": narrowed(scale)}
        if self.scheme.zero is not None:
            kept["zero"] = self.column(weights.pop(self.scheme.zero))
            if not bool(kept["zero"].any()):
                del kept["zero"]
        return {**{name: t for name, t in weights.items() if name not in self.scheme.unused}, **kept}

    def small(self, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Rounded`. Zero points that are not zero are left to torch."""
        codes, scale = weights[self.scheme.weight], weights.get("scale")
        if "zero" in weights:
            return None
        # Weights that were never loaded have no values, and are asked for shapes alone.
        return codes, codes.new_empty(len(codes), dtype=torch.float32) if scale is None else scale.view(-1)

    def kind(self) -> str | None:
        """See `Stored`."""
        if self.inputs is not None:
            return None
        return kind_of_bytes("int8", self.group_size, self.num_inputs)

    def coded(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """See `Stored`."""
        kind = self.kind()
        return None if kind is None else coded_bytes(self, kind, weights)

    def numbers(self, weights: dict[str, torch.Tensor], first: int, count: int) -> torch.Tensor:
        """See `Grouped`."""
        return weights[self.scheme.weight][first : first + count].float()
