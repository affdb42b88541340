"""A product with a packed weight added in place: one program owns each result; with many tokens cuBLAS adds."""

from __future__ import annotations

import torch

from samovar.kernels.coded_linear.triton import (
    accepts,
    accepts_fixed,
    multiply,
    multiply_decoded,
    multiply_fixed,
    tile_of,
)
from samovar.kernels.coded_linear_add import coded_linear_add


@coded_linear_add.impl("triton", devices=("cuda",), accepts=accepts)
def coded_linear_add_triton(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    kind: str,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """One kernel for few tokens; decoded rows and cuBLAS for many."""
    tile = tile_of(x, row_scale.shape[0], kind)
    weight = codes, scale, row_scale, kind
    if tile is None:
        multiply_decoded(x, weight, residual, bias, adds=True)
    else:
        multiply(tile, x, weight, residual, bias=bias, residual=residual)


@coded_linear_add.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def coded_linear_add_fixed(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    kind: str,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """The same instructions for a row whatever is computed beside it."""
    multiply_fixed(x, (codes, scale, row_scale, kind), residual, bias, residual)
