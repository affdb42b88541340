"""The kernel of silu_mul with the other activation."""

from __future__ import annotations

import torch

from samovar.kernels.gelu_mul import gelu_mul
from samovar.kernels.silu_mul.triton import gated


@gelu_mul.impl("triton", devices=("cuda",))
def gelu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """One kernel, rounded once; rows of gate_up may lie apart."""
    return gated(gate_up, "gelu")
