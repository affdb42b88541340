"""Residual add and RMS norm in one op: what every pre-norm block does twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op


@op(prefer=("triton", "torch_fused"))
def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(s) * weight, s) with s = x + residual rounded to x's dtype; the norm is computed in float32.

    x, residual [tokens, dim]; weight [dim] of x's dtype or float32.
    """
    total = x + residual
    x32 = total.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * weight.float()).to(x.dtype), total


@add_rms_norm.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, dim in ((3, 64), (1, 576), (129, 48)):
        yield torch.randn(tokens, dim), torch.randn(tokens, dim), torch.randn(dim), 1e-6


add_rms_norm.tolerance[torch.float32] = (2e-6, 2e-6)
add_rms_norm.tolerance[torch.bfloat16] = (1e-2, 1.6e-2)
add_rms_norm.tolerance[torch.float16] = (1e-3, 2e-3)
