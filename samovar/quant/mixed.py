"""Linears that are one here and stored in different formats: each part has a format and tensors of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from samovar.native.abi import CMatrix
from samovar.quant.base import FeatureAxis, QuantMethod, TensorSpec
from samovar.quant.checks import Check, Use
from samovar.quant.packed import Packed
from samovar.quant.parts import Parts, Tensors


def mixed(methods: Sequence[QuantMethod]) -> QuantMethod:
    """One format for parts of `methods`; the CPU library's, if all are."""
    packed = [method for method in methods if isinstance(method, Packed)]
    return MixedPacked(packed) if len(packed) == len(methods) else Mixed(methods)


class Mixed(Parts, QuantMethod):
    """One product for each part."""

    tensors = ()
    may_store_zero_bias = True

    def __init__(self, methods: Sequence[QuantMethod]) -> None:
        QuantMethod.__init__(self, methods[0].kernels)
        Parts.__init__(self, methods)
        self.note = "; ".join(dict.fromkeys(method.note or type(method).__name__ for method in methods))
        self.part_rows: list[int] = []

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> Tensors:
        """See `QuantMethod`."""
        self.part_rows = list(part_rows)
        return super().allocate(specs, features, part_rows, empty)

    def after_load(self, weights: Tensors, part_rows: list[int]) -> Tensors:
        """See `QuantMethod`."""
        return self.loaded(weights, part_rows)

    def checks(self, weights: Tensors, use: Use) -> list[Check]:
        """See `QuantMethod`."""
        found = (method.checks(self.of(weights, part), "plain") for part, method in enumerate(self.methods))
        return [check for checks in found for check in checks]

    def multiply(self, x: torch.Tensor, weights: Tensors, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `QuantMethod`."""
        biases = [None] * len(self.methods) if bias is None else torch.split(bias, self.part_rows)
        products = [
            method.multiply(x, self.of(weights, part), own)
            for part, (method, own) in enumerate(zip(self.methods, biases, strict=True))
        ]
        return torch.cat(products, -1)


class MixedPacked(Parts, Packed):
    """The library multiplies matrices of several formats side by side."""

    may_store_zero_bias = True

    def __init__(self, methods: Sequence[Packed]) -> None:
        first = methods[0]
        formats = [format for method in methods for format in method.formats]
        Packed.__init__(self, first.plain, first.products, first.kernels, formats=formats)
        Parts.__init__(self, methods)
        self.packed, self.tensors = list(methods), ()
        self.note = "; ".join(dict.fromkeys(method.note for method in methods if method.note))

    def after_load(self, weights: Tensors, part_rows: list[int]) -> Tensors:
        """See `QuantMethod`."""
        kept = self.loaded(weights, part_rows)
        matrices = [matrix for method in self.packed for matrix in method.matrices]
        self.matrices = (CMatrix * len(matrices))(*matrices)
        self.formats = tuple(format for method in self.packed for format in method.formats)
        return kept
