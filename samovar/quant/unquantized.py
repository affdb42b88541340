"""Plain weights in the model's own dtype."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from samovar.quant.base import QuantMethod, TensorSpec


class Unquantized(QuantMethod):
    """One `weight` tensor [out, in] of `dtype`."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.tensors = (TensorSpec("weight", dtype),)

    def multiply(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + b."""
        return linear(x, weights["weight"], bias)
