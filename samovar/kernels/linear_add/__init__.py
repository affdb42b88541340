"""A product added to the residual stream in place: how every block of a transformer ends, twice."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op


@op(prefer=("triton", "triton_fixed"), mutates=("residual",), plain_is_best=("cpu",))
def linear_add(x: torch.Tensor, weight: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """residual [tokens, out] += x [tokens, in] times weight [out, in] transposed, plus bias [out]."""
    residual += torch.nn.functional.linear(x, weight, bias)


@linear_add.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, features_in, features_out in ((1, 64, 40), (5, 96, 24), (70, 64, 24), (0, 64, 24)):
        x, weight = torch.randn(tokens, features_in), torch.randn(features_out, features_in) / features_in**0.5
        yield x, weight, torch.randn(tokens, features_out)
        yield x, weight, torch.randn(tokens, features_out), torch.randn(features_out)


linear_add.tolerance[torch.float32] = (1e-5, 1e-5)
linear_add.tolerance[torch.bfloat16] = (3e-2, 1.6e-2)
linear_add.tolerance[torch.float16] = (6e-3, 4e-3)
