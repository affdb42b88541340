"""A format whose products are those of another, which is known once weights are there."""

from __future__ import annotations

import torch

from samovar.quant.base import Activation, QuantMethod, Weights
from samovar.quant.checks import Check, Use
from samovar.quant.stored import Stored


class Delegate(QuantMethod):
    """Subclasses say whose products they are."""

    def held(self, weights: Weights) -> tuple[Stored, Weights]:
        """The other format, and its tensors."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it holds")

    def checks(self, weights: Weights, use: Use) -> list[Check]:
        """See `QuantMethod`."""
        method, kept = self.held(weights)
        return method.checks(kept, use)

    def multiply(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `QuantMethod`."""
        method, kept = self.held(weights)
        return method.multiply(x, kept, bias)

    def add_multiply(
        self, x: torch.Tensor, weights: Weights, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """See `QuantMethod`."""
        method, kept = self.held(weights)
        method.add_multiply(x, kept, residual, bias)

    def norm_multiply(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weights: Weights, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `QuantMethod`."""
        method, kept = self.held(weights)
        return method.norm_multiply(x, norm_weight, eps, kept, bias)

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
        method, kept = self.held(weights)
        return method.norm_gated_multiply(x, norm_weight, eps, kept, activation, bias)
