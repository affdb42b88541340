"""Plain weights in the model's own dtype."""

from __future__ import annotations

import torch

from samovar.kernels.linear import linear
from samovar.kernels.linear_add import linear_add
from samovar.kernels.logits import logits
from samovar.kernels.norm_gated_linear import norm_gated_linear
from samovar.kernels.norm_linear import norm_linear
from samovar.kernels.op import Kernels
from samovar.quant.base import Activation, QuantMethod, TensorSpec


class Unquantized(QuantMethod):
    """One `weight` tensor [out, in] of `dtype`; every product is one op."""

    def __init__(self, dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.tensors = (TensorSpec("weight", dtype),)
        self.linear, self.linear_add = kernels.use(linear), kernels.use(linear_add)
        self.norm_linear, self.norm_gated_linear = kernels.use(norm_linear), kernels.use(norm_gated_linear)
        self.head = kernels.use(logits)

    def multiply(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + b."""
        return self.linear(x, weights["weight"], bias)

    def add_multiply(
        self,
        x: torch.Tensor,
        weights: dict[str, torch.Tensor],
        residual: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """residual += x W^T + b."""
        self.linear_add(x, weights["weight"], residual, bias)

    def norm_multiply(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weights: dict[str, torch.Tensor],
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """norm(x) W^T + b."""
        return self.norm_linear(x, norm_weight, eps, weights["weight"], bias)

    def norm_gated_multiply(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weights: dict[str, torch.Tensor],
        activation: Activation,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """activation(gate) * up of norm(x) W^T + b."""
        return self.norm_gated_linear(x, norm_weight, eps, weights["weight"], activation, bias)

    def logits(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """x W^T in float32."""
        return self.head(x, weights["weight"])
