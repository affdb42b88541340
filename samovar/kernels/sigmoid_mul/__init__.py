"""Attention whose output is gated number by number (Qiu et al., 2025, arXiv 2505.06708): y * sigmoid(gate)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op


@op(prefer=("triton",), plain_is_best=("cpu",))
def sigmoid_mul(y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """y * sigmoid(gate) for y, gate [tokens, dim], whose rows may lie apart -> [tokens, dim]."""
    return torch.sigmoid(gate).mul_(y)


@sigmoid_mul.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, dim in ((3, 64), (1, 1536), (65, 24)):
        yield torch.randn(tokens, dim), torch.randn(tokens, dim + 8)[:, 8:]


sigmoid_mul.tolerance[torch.float32] = (2e-6, 2e-6)
sigmoid_mul.tolerance[torch.bfloat16] = (1e-2, 1.6e-2)
sigmoid_mul.tolerance[torch.float16] = (1e-3, 2e-3)
