"""RMS norm over the last axis (Zhang and Sennrich, 2019)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op


@op(prefer=("triton", "torch_fused"))
def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight, over the last axis, computed in float32; result in x's dtype.

    x [..., dim]; weight [dim] of x's dtype or float32.
    """
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
    return (x32 * weight.float()).to(x.dtype)


@rms_norm.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for shape in ((3, 64), (1, 576), (7, 4, 16), (129, 48)):
        yield torch.randn(shape), torch.randn(shape[-1]), 1e-6


rms_norm.tolerance[torch.float32] = (2e-6, 2e-6)
rms_norm.tolerance[torch.bfloat16] = (1e-2, 1.6e-2)
rms_norm.tolerance[torch.float16] = (1e-3, 2e-3)
