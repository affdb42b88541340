"""The dense product of activations with a weight stored row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op


@op(prefer=("triton", "triton_fixed", "torch_column"), plain_is_best=("cpu",))
def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [tokens, in] times weight [out, in] transposed, plus bias [out] -> [tokens, out]."""
    return torch.nn.functional.linear(x, weight, bias)


@linear.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, features_in, features_out in ((1, 64, 40), (5, 96, 24), (130, 64, 32), (0, 64, 32)):
        x, weight = torch.randn(tokens, features_in), torch.randn(features_out, features_in) / features_in**0.5
        yield x, weight
        yield x, weight, torch.randn(features_out)


linear.tolerance[torch.float32] = (1e-5, 1e-5)
linear.tolerance[torch.bfloat16] = (2e-2, 1.6e-2)
linear.tolerance[torch.float16] = (4e-3, 4e-3)
