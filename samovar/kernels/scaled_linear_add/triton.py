"""A scaled product added in place: one program owns each result; torch's product is added in a pass of its own."""

from __future__ import annotations

import torch

from samovar.kernels.scaled_linear.triton import Given, accepts, accepts_fixed, fixed_product, scaled_product
from samovar.kernels.scaled_linear_add import scaled_linear_add


@scaled_linear_add.impl("triton", devices=("cuda",), accepts=accepts)
def scaled_linear_add_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """Added before results leave the chip, up to a few tokens."""
    scaled_product(x, Given(weight, scale, input_scale, bias, residual))


@scaled_linear_add.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def scaled_linear_add_fixed(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """The same instructions for a row whatever is computed beside it."""
    fixed_product(x, Given(weight, scale, input_scale, bias, residual))
