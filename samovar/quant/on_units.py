"""Linears that a GPU's units for small numbers multiply, where they can: everything else is dequantized, as elsewhere."""

from __future__ import annotations

import torch

from samovar.kernels.scaled_linear import BLOCK
from samovar.quant.base import Activation, Weights
from samovar.quant.checks import Check, Use
from samovar.quant.grouped import Grouped
from samovar.quant.scaled import ScaledProducts, ScaledWeight
from samovar.quant.scaled_check import scaled_check


class OnUnits(Grouped):
    """Subclasses say with `scaled` what is multiplied so. `products` are the ops; None on other devices."""

    products: ScaledProducts | None

    def scaled(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> ScaledWeight | None:
        """The weight for the ops; None where they cannot be used."""
        raise NotImplementedError(f"{type(self).__name__} has no weight for the ops")

    def checks(self, weights: Weights, use: Use) -> list[Check]:
        """See `QuantMethod`."""
        if self.products is None:
            return super().checks(weights, use)
        weight = self.scaled(torch.empty(0, self.num_inputs, device="meta"), weights)
        if weight is None or not (weight.input_scale is None or len(weight.input_scale) == 1):
            return []
        is_cut = use in ("silu", "gelu") and (not self.products.is_joined or self._splits_a_block(weight))
        return [scaled_check(self.products, weight, "normed" if is_cut else use)]

    def multiply(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `QuantMethod`."""
        weight = self.scaled(x, weights)
        if weight is None or self.products is None:
            return super().multiply(x, weights, bias)
        return self.products.multiply(x, weight, self.part_rows, bias)

    def logits(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """See `QuantMethod`."""
        if self.scaled(x, weights) is None:
            return super().logits(x, weights)
        return self.multiply(x, weights).float()

    def add_multiply(
        self,
        x: torch.Tensor,
        weights: dict[str, torch.Tensor],
        residual: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """See `QuantMethod`."""
        weight = self.scaled(x, weights)
        if weight is None or self.products is None or not self.products.joins(weight):
            return super().add_multiply(x, weights, residual, bias)
        return self.products.add(x, weight, residual, bias)

    def norm_multiply(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weights: dict[str, torch.Tensor],
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `QuantMethod`."""
        weight = self.scaled(x, weights)
        if weight is None or self.products is None or not self.products.joins(weight):
            return super().norm_multiply(x, norm_weight, eps, weights, bias)
        return self.products.norm(x, (norm_weight, eps), weight, bias)

    def norm_gated_multiply(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weights: dict[str, torch.Tensor],
        activation: Activation,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `QuantMethod`. Of blocks, gate and up must have whole ones."""
        weight = self.scaled(x, weights)
        if weight is None or self.products is None or not self.products.joins(weight) or self._splits_a_block(weight):
            return super().norm_gated_multiply(x, norm_weight, eps, weights, activation, bias)
        return self.products.norm_gated(x, (norm_weight, eps), weight, activation, bias)

    def _splits_a_block(self, weight: ScaledWeight) -> bool:
        return weight.scale.dim() == 2 and len(weight.codes) // 2 % BLOCK != 0
