"""Formats of checkpoints whose weights may be packed for a kernel: which kind they are, and how large they become."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from samovar.kernels.op import Kernels
from samovar.quant.base import FeatureAxis, TensorSpec, Weights
from samovar.quant.checks import Check, Use
from samovar.quant.coded import CodedProducts, Packed, has_kernel
from samovar.quant.decoded import Decoded


class Packable(Decoded):
    """One layer. Subclasses that `coded_weights` has a kind for say which, and give codes and scales."""

    def __init__(self, names: Sequence[str], tensors: Sequence[TensorSpec], kernels: Kernels) -> None:
        super().__init__(names, tensors, kernels)
        self.coded_products: CodedProducts | None = None

    def repack(self, weights: Weights) -> Weights:
        """What is kept of what was loaded."""
        return weights

    def kind(self) -> str | None:
        """Of which kind of `coded_weights` the weight is; None if of none. Said before it is loaded."""
        return None

    def coded(self, weights: Weights) -> Weights | None:
        """What `repack` kept as `quant.coded` names it; None for what cannot be packed so after all."""
        return None

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> Weights:
        """See `QuantMethod`."""
        made = super().allocate(specs, features, part_rows, empty)
        self.choose_coded()
        return made

    def resident_bytes(self, weights: Weights, part_rows: Sequence[int]) -> int:
        """See `QuantMethod`. An upper bound: scales may shrink, and some of one a part become one a row."""
        stored = super().resident_bytes(weights, part_rows) + sum(part_rows) * torch.float32.itemsize
        if self.coded_products is None:
            return stored
        others = sum(weights[name].nbytes for name in weights if name == "bias")
        packed = self.coded_products.num_bytes(sum(part_rows), self.num_inputs) + others
        if not any(name.endswith("g_idx") for name in weights):
            return packed
        return max(stored, packed + self.num_inputs * torch.int32.itemsize)

    def after_load(self, weights: Weights, part_rows: list[int]) -> Weights:
        """See `QuantMethod`."""
        return self.for_kernel(self.repack(weights))

    def choose_coded(self) -> None:
        """Take the ops for packed weights where this weight has a kind and the target a kernel."""
        kind = self.kind() if has_kernel(self.kernels) else None
        self.coded_products = None if kind is None else CodedProducts(kind, self.kernels)

    def for_kernel(self, kept: Weights) -> Weights:
        """What `repack` gave, packed if there are ops for that."""
        packed = None if self.coded_products is None else self.coded(kept)
        if packed is None:
            return kept
        return packed | {name: tensor for name, tensor in kept.items() if name == "bias"}

    def checks(self, weights: Weights, use: Use) -> list[Check]:
        """See `QuantMethod`."""
        found = self.found_packed(next(iter(weights.values())), weights)
        if found is None:
            return []
        products, packed = found
        return [products.check(packed, self.num_inputs, use)]

    def found_packed(self, x: torch.Tensor, weights: Weights) -> tuple[CodedProducts, Packed] | None:
        """The ops and their weight, if it is packed; kernels are noted with one that has no memory, as `x` then is."""
        if self.coded_products is None:
            return None
        products = self.coded_products
        packed = products.of(weights)
        if packed is None and x.is_meta:
            packed = products.without_memory(sum(self.part_rows), self.num_inputs)
        return None if packed is None else (products, packed)
