"""A product with a weight of four bits, added to the residual stream in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.coded_linear import coded_linear, random_weight
from samovar.kernels.coded_weights import KINDS
from samovar.kernels.op import op


@op(prefer=("triton", "triton_fixed"), mutates=("residual",), plain_is_best=("cpu",))
def coded_linear_add(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    kind: str,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    """residual [tokens, out] += `coded_linear` of the other arguments."""
    residual += coded_linear.reference(x, codes, scale, row_scale, kind, bias)


@coded_linear_add.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    sizes = (
        (1, 128, 40),
        (0, 64, 32),
        (5, 96, 24),
        (70, 192, 72),
        (3, 64, 16),
        (17, 128, 24),
        (2, 128, 48),
        (9, 64, 16),
        (1, 160, 32),
        (4, 96, 16),
    )
    for (tokens, inputs, rows), kind in zip(sizes, KINDS, strict=True):
        x = torch.randn(tokens, inputs)
        yield (
            x,
            *random_weight(rows, inputs, kind),
            torch.randn(tokens, rows),
            torch.randn(rows) if tokens > 1 else None,
        )


coded_linear_add.tolerance[torch.float32] = (1e-5, 1e-5)
coded_linear_add.tolerance[torch.bfloat16] = (4e-2, 1.6e-2)
coded_linear_add.tolerance[torch.float16] = (3e-2, 1.6e-2)  # the weight is decoded to bfloat16
