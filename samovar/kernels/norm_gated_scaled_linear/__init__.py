"""The first half of a gated MLP (Shazeer, 2020) with rounded activations and weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from samovar.kernels.gelu_mul import gelu_mul
from samovar.kernels.norm_scaled_linear import norm_scaled_linear
from samovar.kernels.op import op
from samovar.kernels.scaled_linear import weight_of
from samovar.kernels.silu_mul import silu_mul


@op(prefer=("triton", "triton_fixed"), plain_is_best=("cpu",))
def norm_gated_scaled_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    scale: torch.Tensor,
    activation: Literal["silu", "gelu"],
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(gate) * up of `norm_scaled_linear` -> [tokens, hidden].

    weight [2 * hidden, in] holds the rows of gate, then those of up; scale and bias likewise. With blocks, hidden is a
    multiple of 128. gelu is its tanh approximation.
    """
    gate_up = norm_scaled_linear(x, norm_weight, eps, weight, scale, input_scale, bias)
    return silu_mul(gate_up) if activation == "silu" else gelu_mul(gate_up)


@norm_gated_scaled_linear.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    yield 3 * torch.randn(1, 128), torch.rand(128), 1e-6, *weight_of(40, 128, "fp8"), "silu"
    yield 3 * torch.randn(1, 128), torch.rand(128), 1e-6, *weight_of(256, 128, "blocks"), "gelu"
    yield 3 * torch.randn(5, 96), torch.rand(96), 1e-6, *weight_of(40, 96, "int8"), "gelu", None, torch.randn(40)
    yield 3 * torch.randn(3, 128), torch.rand(128), 1e-6, *weight_of(256, 128, "blocks"), "silu"


# See `norm_scaled_linear`: the errors of both products are multiplied by up to the size of the other one, four or five.
norm_gated_scaled_linear.tolerance[torch.float32] = (3e-2, 1e-2)
norm_gated_scaled_linear.tolerance[torch.bfloat16] = (5e-1, 5e-2)
norm_gated_scaled_linear.tolerance[torch.float16] = (1e-1, 3e-2)
