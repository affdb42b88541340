"""Gate and up products of a gated MLP (Shazeer, 2020) with a weight of four bits: activation(gate) * up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from samovar.kernels.coded_linear import coded_linear, random_weight
from samovar.kernels.coded_weights import KINDS
from samovar.kernels.gelu_mul import gelu_mul
from samovar.kernels.op import op
from samovar.kernels.silu_mul import silu_mul


@op(prefer=("triton", "triton_fixed"), plain_is_best=("cpu",))
def coded_gated_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    kind: str,
    activation: Literal["silu", "gelu"],
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """activation(gate) * up of x [tokens, in] -> [tokens, hidden], where `coded_linear` gives gate then up.

    row_scale and bias have 2 * hidden rows. gelu is its tanh approximation.
    """
    gate_up = coded_linear.reference(x, codes, scale, row_scale, kind, bias)
    return silu_mul(gate_up) if activation == "silu" else gelu_mul(gate_up)


@coded_gated_linear.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    sizes = (
        (1, 128, 32),
        (0, 64, 16),
        (5, 96, 24),
        (35, 192, 48),
        (3, 64, 16),
        (17, 128, 32),
        (2, 128, 48),
        (9, 64, 16),
        (1, 160, 32),
        (4, 96, 16),
    )
    for (tokens, inputs, hidden), kind in zip(sizes, KINDS, strict=True):
        x = torch.randn(tokens, inputs)
        bias = torch.randn(2 * hidden) if tokens > 1 else None
        yield x, *random_weight(2 * hidden, inputs, kind), "gelu" if tokens % 5 == 0 else "silu", bias


coded_gated_linear.tolerance[torch.float32] = (4e-5, 1e-5)
coded_gated_linear.tolerance[torch.bfloat16] = (1e-1, 3e-2)
coded_gated_linear.tolerance[torch.float16] = (1e-1, 3e-2)  # the weight is decoded to bfloat16
