"""The first half of a gated MLP (Shazeer, 2020): RMS norm, gate and up products, activation(gate) * up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from samovar.kernels.gelu_mul import gelu_mul
from samovar.kernels.op import op
from samovar.kernels.rms_norm import rms_norm
from samovar.kernels.silu_mul import silu_mul


@op(prefer=("triton", "triton_fixed"), plain_is_best=("cpu",))
def norm_gated_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    activation: Literal["silu", "gelu"],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(gate) * up of rms_norm(x [tokens, in]) -> [tokens, hidden].

    weight [2 * hidden, in] holds the rows of gate, then those of up; bias [2 * hidden] likewise. norm_weight [in] of x's
    dtype or float32. gelu is its tanh approximation.
    """
    gate_up = torch.nn.functional.linear(rms_norm(x, norm_weight, eps), weight, bias)
    return silu_mul(gate_up) if activation == "silu" else gelu_mul(gate_up)


@norm_gated_linear.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, features_in, hidden in ((1, 64, 24), (5, 96, 20), (70, 64, 16), (0, 64, 16)):
        x, weight = torch.randn(tokens, features_in), torch.randn(2 * hidden, features_in) / features_in**0.5
        yield 3 * x, torch.rand(features_in), 1e-6, weight, "silu"
        yield 3 * x, torch.rand(features_in), 1e-6, weight, "gelu", torch.randn(2 * hidden)


norm_gated_linear.tolerance[torch.float32] = (2e-5, 1e-5)
norm_gated_linear.tolerance[torch.bfloat16] = (6e-2, 2e-2)
norm_gated_linear.tolerance[torch.float16] = (1e-2, 5e-3)
