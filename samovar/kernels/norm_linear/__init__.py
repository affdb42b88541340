"""RMS norm (Zhang and Sennrich, 2019) and the product that reads it, as one op."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op
from samovar.kernels.rms_norm import rms_norm


@op(prefer=("triton", "triton_fixed"), plain_is_best=("cpu",))
def norm_linear(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """rms_norm(x [tokens, in]) times weight [out, in] transposed, plus bias [out] -> [tokens, out].

    norm_weight [in] of x's dtype or float32.
    """
    return torch.nn.functional.linear(rms_norm(x, norm_weight, eps), weight, bias)


@norm_linear.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, features_in, features_out in ((1, 64, 40), (5, 96, 24), (70, 64, 24), (0, 64, 24)):
        x, weight = torch.randn(tokens, features_in), torch.randn(features_out, features_in) / features_in**0.5
        yield 3 * x, torch.rand(features_in), 1e-6, weight
        yield 3 * x, torch.rand(features_in), 1e-6, weight, torch.randn(features_out)


norm_linear.tolerance[torch.float32] = (1e-5, 1e-5)
norm_linear.tolerance[torch.bfloat16] = (3e-2, 1.6e-2)
norm_linear.tolerance[torch.float16] = (6e-3, 4e-3)
