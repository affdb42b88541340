"""Gate, up and activation with a packed weight: one kernel for few tokens, product and activation for more."""

from __future__ import annotations

from typing import Literal

import torch

from samovar.kernels.coded_gated_linear import coded_gated_linear
from samovar.kernels.coded_linear.tiles import fixed_tile
from samovar.kernels.coded_linear.triton import (
    accepts,
    accepts_fixed,
    coded_linear_fixed,
    coded_linear_triton,
    multiply,
    tile_of,
)
from samovar.kernels.coded_weights import BRICK_ROWS
from samovar.kernels.gelu_mul.triton import gelu_mul_triton
from samovar.kernels.silu_mul.triton import silu_mul_triton

ACTIVATIONS = {"silu": silu_mul_triton, "gelu": gelu_mul_triton}


@coded_gated_linear.impl("triton", devices=("cuda",), accepts=accepts)
def coded_gated_linear_triton(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    kind: str,
    activation: Literal["silu", "gelu"],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gate and up of a result meet in one program where `tile_of` has a tile for that."""
    hidden = row_scale.shape[0] // 2
    tile = tile_of(x, hidden, kind, parts=2)
    if tile is None:
        return ACTIVATIONS[activation](coded_linear_triton(x, codes, scale, row_scale, kind, bias))
    out = x.new_empty(x.shape[0], hidden)
    return multiply(tile, x, (codes, scale, row_scale, kind), out, bias=bias, gate=activation)


@coded_gated_linear.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def coded_gated_linear_fixed(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    kind: str,
    activation: Literal["silu", "gelu"],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it."""
    hidden = row_scale.shape[0] // 2
    if hidden % BRICK_ROWS:
        return ACTIVATIONS[activation](coded_linear_fixed(x, codes, scale, row_scale, kind, bias))
    out = x.new_empty(x.shape[0], hidden)
    weight = codes, scale, row_scale, kind
    return multiply(fixed_tile(parts=2), x, weight, out, bias=bias, gate=activation)
