"""Formats of checkpoints with the kernels that a target has for them: ops for packed weights, or rows made anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from samovar.kernels.op import Kernels
from samovar.kernels.rms_norm import rms_norm
from samovar.quant.base import Activation, FeatureAxis, TensorSpec, Weights
from samovar.quant.coded import CodedProducts, Packed, has_kernel
from samovar.quant.decoded import Decoded


class Stored(Decoded):
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
        if self.coded_products is not None and "g_idx" not in weights:
            others = sum(weights[name].nbytes for name in weights if name == "bias")
            return self.coded_products.num_bytes(sum(part_rows), self.num_inputs) + others
        return super().resident_bytes(weights, part_rows) + sum(part_rows) * torch.float32.itemsize

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

    def _packed(self, x: torch.Tensor, weights: Weights) -> tuple[CodedProducts, Packed] | None:
        """The ops and their weight, if it is packed; kernels are noted with one that has no memory."""
        if self.coded_products is None:
            return None
        products = self.coded_products
        packed = products.of(weights)
        if packed is None and x.is_meta:
            packed = products.without_memory(sum(self.part_rows), self.num_inputs)
        return None if packed is None else (products, packed)

    def multiply(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `QuantMethod`."""
        if (found := self._packed(x, weights)) is None:
            return super().multiply(x, weights, bias)
        products, packed = found
        return products.linear(x, *packed, bias)

    def logits(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """See `QuantMethod`."""
        if self._packed(x, weights) is None:
            return super().logits(x, weights)
        return self.multiply(x, weights).float()

    def add_multiply(
        self, x: torch.Tensor, weights: Weights, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """See `QuantMethod`."""
        if (found := self._packed(x, weights)) is None:
            super().add_multiply(x, weights, residual, bias)
        else:
            products, packed = found
            products.add(x, *packed, residual, bias)

    def norm_gated_multiply(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weights: Weights,
        activation: Activation,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `QuantMethod`."""
        if (found := self._packed(x, weights)) is None:
            return super().norm_gated_multiply(x, norm_weight, eps, weights, activation, bias)
        products, packed = found
        return products.gated(self.kernels.use(rms_norm)(x, norm_weight, eps), *packed, activation, bias)
