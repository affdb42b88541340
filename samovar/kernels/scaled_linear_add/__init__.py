"""`scaled_linear` added to the residual stream in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op
from samovar.kernels.scaled_linear import scaled_linear, weight_of


@op(prefer=("triton", "triton_fixed"), mutates=("residual",), plain_is_best=("cpu",))
def scaled_linear_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    residual: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> None:
    """residual [tokens, out] += `scaled_linear` of the other arguments."""
    residual += scaled_linear(x, weight, scale, input_scale, bias)


@scaled_linear_add.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(1, 128), *weight_of(40, 128, "fp8"), torch.randn(1, 40)
    yield torch.randn(1, 256), *weight_of(24, 256, "blocks"), torch.randn(1, 24), None, torch.randn(24)
    yield torch.randn(5, 96), *weight_of(24, 96, "int8"), torch.randn(5, 24), torch.tensor([0.02]), torch.randn(24)


scaled_linear_add.tolerance[torch.float32] = (2e-5, 1e-5)
scaled_linear_add.tolerance[torch.bfloat16] = (3e-2, 1.6e-2)
scaled_linear_add.tolerance[torch.float16] = (6e-3, 4e-3)
