"""RMS norm, rounding and scaled product: one kernel for one token; for more, norm and rounding are one, the product another."""

from __future__ import annotations

import torch

from samovar.kernels.norm_scaled_linear import norm_scaled_linear
from samovar.kernels.scaled_linear.triton import Given, accepts, accepts_fixed, fixed_product, scaled_product


@norm_scaled_linear.impl("triton", devices=("cuda",), accepts=accepts)
def norm_scaled_linear_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The norm is never written out but in small numbers."""
    return scaled_product(x, Given(weight, scale, input_scale, bias, norm=(norm_weight, eps)))


@norm_scaled_linear.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def norm_scaled_linear_fixed(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it."""
    return fixed_product(x, Given(weight, scale, input_scale, bias, norm=(norm_weight, eps)))
