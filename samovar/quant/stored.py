"""Formats of checkpoints with the kernels that a target has for them: ops for packed weights, or rows made anew."""

from __future__ import annotations

import torch

from samovar.kernels.rms_norm import rms_norm
from samovar.quant.base import Activation, Weights
from samovar.quant.coding import ORDER
from samovar.quant.packable import Packable


class Stored(Packable):
    """The products of one layer."""

    def multiply(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `QuantMethod`."""
        if (found := self.found_packed(x, weights)) is None:
            return super().multiply(x, weights, bias)
        products, packed = found
        return products.linear(_in_order(x, weights), *packed, bias)

    def logits(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """See `QuantMethod`."""
        if self.found_packed(x, weights) is None:
            return super().logits(x, weights)
        return self.multiply(x, weights).float()

    def add_multiply(
        self, x: torch.Tensor, weights: Weights, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """See `QuantMethod`."""
        if (found := self.found_packed(x, weights)) is None:
            super().add_multiply(x, weights, residual, bias)
        else:
            products, packed = found
            products.add(_in_order(x, weights), *packed, residual, bias)

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
        if (found := self.found_packed(x, weights)) is None:
            return super().norm_gated_multiply(x, norm_weight, eps, weights, activation, bias)
        products, packed = found
        given = _in_order(self.kernels.use(rms_norm)(x, norm_weight, eps), weights)
        return products.gated(given, *packed, activation, bias)


def _in_order(x: torch.Tensor, weights: Weights) -> torch.Tensor:
    """x as act-order has its inputs."""
    return x.index_select(1, weights[ORDER]) if ORDER in weights else x
