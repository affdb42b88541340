"""Products for chips without FP8: activations are rounded all the same, weights become 16 bits wide block by block."""

from __future__ import annotations

import torch
from torch.nn.functional import linear as dense

from samovar.kernels.scaled_linear import BLOCK, dequantized, rounded_inputs, scaled_linear

BLOCK_WEIGHTS = 1 << 24
"""Weights that are made wide together, about."""


@scaled_linear.impl("torch_wide", devices=("cuda",))
def scaled_linear_wide(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """cuBLAS's product of what was rounded, in x's dtype."""
    given = rounded_inputs(x, weight, scale, input_scale).to(x.dtype)
    out = x.new_empty(len(x), len(weight))
    step = max(1, BLOCK_WEIGHTS // (weight.shape[1] * BLOCK)) * BLOCK
    for first in range(0, len(weight), step):
        rows = slice(first, first + step)
        scales = scale[rows] if scale.dim() == 1 else scale[first // BLOCK : (first + step) // BLOCK]
        part = None if bias is None else bias[rows]
        out[:, rows] = dense(given, dequantized(weight[rows], scales).to(x.dtype), part)
    return out
