"""The output head: sums in float32 are stored as they are, by our kernels and by cuBLAS."""

from __future__ import annotations

import torch
from torch.nn.functional import linear as dense

from samovar.kernels.linear.tiles import fixed_tile
from samovar.kernels.linear.triton import accepts, accepts_fixed, multiply, tile_of
from samovar.kernels.logits import logits


@logits.impl("triton", devices=("cuda",), accepts=accepts)
def logits_triton(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A kernel of ours for few rows, cuBLAS for many."""
    tile = tile_of(x, weight.shape[0])
    if tile is not None:
        return multiply(tile, x, weight, x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32))
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return dense(x, weight).float()  # torch has the wide result on CUDA only; shapes alone are asked for elsewhere


@logits.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def logits_fixed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it."""
    return multiply(
        fixed_tile(x.element_size()), x, weight, x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)
    )
