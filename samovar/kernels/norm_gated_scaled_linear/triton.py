"""RMS norm, rounding, scaled products of gate and up, and activation: one kernel for one token, two for a few, three for many."""

from __future__ import annotations

from typing import Literal

import torch

from samovar.kernels.norm_gated_scaled_linear import norm_gated_scaled_linear
from samovar.kernels.scaled_linear.triton import Given, accepts, accepts_fixed, fixed_product, scaled_product


@norm_gated_scaled_linear.impl("triton", devices=("cuda",), accepts=accepts)
def norm_gated_scaled_linear_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    scale: torch.Tensor,
    activation: Literal["silu", "gelu"],
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate and up of a result meet in one program."""
    return scaled_product(x, Given(weight, scale, input_scale, bias, norm=(norm_weight, eps), gate=activation))


@norm_gated_scaled_linear.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def norm_gated_scaled_linear_fixed(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    scale: torch.Tensor,
    activation: Literal["silu", "gelu"],
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it."""
    return fixed_product(x, Given(weight, scale, input_scale, bias, norm=(norm_weight, eps), gate=activation))
