"""The output head by way of `linear`'s CPU implementation of the same name."""

from __future__ import annotations

import torch

from samovar.kernels.linear.torch_column import accepts, linear_torch_column
from samovar.kernels.logits import logits


@logits.impl("torch_column", devices=("cpu",), accepts=accepts)
def logits_torch_column(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(W x^T)^T, then to float32."""
    return linear_torch_column(x, weight).float()
