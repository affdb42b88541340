"""Plain weights in the model's own dtype."""

from __future__ import annotations

import torch

from samovar.kernels.linear import linear
from samovar.kernels.op import Kernels
from samovar.quant.base import QuantMethod, TensorSpec


class Unquantized(QuantMethod):
    """One `weight` tensor [out, in] of `dtype`."""

    def __init__(self, dtype: torch.dtype, kernels: Kernels) -> None:
        self.tensors = (TensorSpec("weight", dtype),)
        self.linear = kernels.use(linear)

    def multiply(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + b."""
        return self.linear(x, weights["weight"], bias)
