"""The output head: the product with the vocabulary, kept in float32 because a sampler compares what it gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op


@op(prefer=("triton", "triton_fixed", "torch_column"), plain_is_best=("cpu",))
def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, dim] times weight [vocabulary, dim] transposed -> float32 [rows, vocabulary]."""
    return torch.nn.functional.linear(x, weight).float()


@logits.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for rows, dim, vocabulary in ((1, 64, 50), (5, 96, 67), (70, 64, 32), (0, 64, 32)):
        yield torch.randn(rows, dim), torch.randn(vocabulary, dim) / dim**0.5


logits.tolerance[torch.float32] = (1e-5, 1e-5)
logits.tolerance[torch.bfloat16] = (2e-2, 1.6e-2)
logits.tolerance[torch.float16] = (4e-3, 4e-3)
