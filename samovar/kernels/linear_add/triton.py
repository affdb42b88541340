"""A product added in place: one program owns each result; with many tokens cuBLAS adds (beta = 1), in no extra pass."""

from __future__ import annotations

import torch

from samovar.kernels.linear.tiles import fixed_tile
from samovar.kernels.linear.triton import accepts, accepts_fixed, multiply, tile_of
from samovar.kernels.linear_add import linear_add


@linear_add.impl("triton", devices=("cuda",), accepts=accepts)
def linear_add_triton(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """A kernel of ours for few tokens, cuBLAS for many."""
    tile = tile_of(x, weight.shape[0])
    if tile is not None:
        multiply(tile, x, weight, residual, bias=bias, residual=residual)
        return
    residual.addmm_(x, weight.t())
    if bias is not None:
        residual += bias


@linear_add.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def linear_add_fixed(
    x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    """The same instructions for a row whatever is computed beside it."""
    multiply(fixed_tile(x.element_size()), x, weight, residual, bias=bias, residual=residual)
