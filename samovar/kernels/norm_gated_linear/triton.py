"""RMS norm, gate and up products and activation: one kernel for one token; norm and product for a few; three for many."""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn.functional import linear as dense

from samovar.kernels.gelu_mul.triton import gelu_mul_triton
from samovar.kernels.linear.tiles import fixed_tile, norms_on_the_fly
from samovar.kernels.linear.triton import accepts, accepts_fixed, multiply, tile_of
from samovar.kernels.norm_gated_linear import norm_gated_linear
from samovar.kernels.rms_norm.triton import rms_norm_triton
from samovar.kernels.silu_mul.triton import silu_mul_triton


@norm_gated_linear.impl("triton", devices=("cuda",), accepts=accepts)
def norm_gated_linear_triton(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    activation: Literal["silu", "gelu"],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate and up of a result meet in one program, normed where `norms_on_the_fly` says so."""
    hidden = weight.shape[0] // 2
    tile = tile_of(x, hidden, parts=2)
    if tile is None:
        gate_up = dense(rms_norm_triton(x, norm_weight, eps), weight, bias)
        return silu_mul_triton(gate_up) if activation == "silu" else gelu_mul_triton(gate_up)
    out = x.new_empty(x.shape[0], hidden)
    if norms_on_the_fly(x.shape[0], hidden, x.shape[1], parts=2):
        return multiply(tile, x, weight, out, bias=bias, norm=(norm_weight, eps), gate=activation)
    return multiply(tile, rms_norm_triton(x, norm_weight, eps), weight, out, bias=bias, gate=activation)


@norm_gated_linear.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def norm_gated_linear_fixed(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    activation: Literal["silu", "gelu"],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it; the norm, one program per row, is written out."""
    out = x.new_empty(x.shape[0], weight.shape[0] // 2)
    return multiply(
        fixed_tile(x.element_size(), parts=2),
        rms_norm_triton(x, norm_weight, eps),
        weight,
        out,
        bias=bias,
        gate=activation,
    )
