"""RMS norm (Zhang and Sennrich, 2019), its rounding, and the `scaled_linear` that reads it, as one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op
from samovar.kernels.rms_norm import rms_norm
from samovar.kernels.scaled_linear import scaled_linear, weight_of


@op(prefer=("triton", "triton_fixed"), plain_is_best=("cpu",))
def norm_scaled_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`scaled_linear` of rms_norm(x [tokens, in]) -> [tokens, out]; norm_weight [in] of x's dtype or float32."""
    return scaled_linear(rms_norm(x, norm_weight, eps), weight, scale, input_scale, bias)


@norm_scaled_linear.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    yield 3 * torch.randn(1, 128), torch.rand(128), 1e-6, *weight_of(40, 128, "fp8")
    yield 3 * torch.randn(1, 96), torch.rand(96), 1e-6, *weight_of(24, 96, "int8"), torch.tensor([0.02])
    yield 3 * torch.randn(5, 256), torch.rand(256), 1e-6, *weight_of(24, 256, "blocks"), None, torch.randn(24)


# A last digit of the norm may move an input to the next small number, a sixteenth away in FP8: of 16-bit norms one in
# fifteen inputs may, which makes a result's error about 0.06 / 15 ** 0.5 of its size, and five times that at worst.
norm_scaled_linear.tolerance[torch.float32] = (2e-2, 1e-2)
norm_scaled_linear.tolerance[torch.bfloat16] = (1e-1, 3e-2)
norm_scaled_linear.tolerance[torch.float16] = (5e-2, 2e-2)
