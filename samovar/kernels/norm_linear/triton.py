"""RMS norm and product: one kernel for one token, which never writes the norm out; two for more."""

from __future__ import annotations

import torch
from torch.nn.functional import linear as dense

from samovar.kernels.linear.tiles import fixed_tile, norms_on_the_fly
from samovar.kernels.linear.triton import accepts, accepts_fixed, multiply, tile_of
from samovar.kernels.norm_linear import norm_linear
from samovar.kernels.rms_norm.triton import rms_norm_triton


@norm_linear.impl("triton", devices=("cuda",), accepts=accepts)
def norm_linear_triton(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Normed in the product where `norms_on_the_fly` says so, for one token that is."""
    tile = tile_of(x, weight.shape[0])
    if tile is None:
        return dense(rms_norm_triton(x, norm_weight, eps), weight, bias)
    out = x.new_empty(x.shape[0], weight.shape[0])
    if norms_on_the_fly(x.shape[0], weight.shape[0], x.shape[1]):
        return multiply(tile, x, weight, out, bias=bias, norm=(norm_weight, eps))
    return multiply(tile, rms_norm_triton(x, norm_weight, eps), weight, out, bias=bias)


@norm_linear.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def norm_linear_fixed(
    x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it; the norm, one program per row, is written out."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    return multiply(fixed_tile(x.element_size()), rms_norm_triton(x, norm_weight, eps), weight, out, bias=bias)
