"""Rotary position embedding (Su et al., 2021) of queries and keys, halves of a head paired."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op


@op(prefer=("triton", "torch_roll"))
def rope(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate the first `rotary_dim` features of every head; the rest pass through.

    q, k [tokens, heads, head_dim]; cos, sin [tokens, 1, rotary_dim] in q's dtype, where `cos` repeats its values for
    both halves and `sin` is negated in the first half, so that out = x * cos + swap_halves(x) * sin.
    """
    half = cos.shape[-1] // 2
    c, s = cos[..., :half].float(), sin[..., half:].float()

    def rotate(x: torch.Tensor) -> torch.Tensor:
        a, b, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
        return torch.cat(((a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype), rest), dim=-1)

    return rotate(q), rotate(k)


@rope.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, heads, kv_heads, dim, rotary in ((3, 4, 2, 16, 16), (1, 9, 3, 64, 64), (33, 4, 1, 20, 8)):
        angle = torch.rand(tokens, 1, rotary // 2) * 6
        cos, sin = angle.cos(), angle.sin()
        tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        yield torch.randn(tokens, heads, dim), torch.randn(tokens, kv_heads, dim), *tables


rope.tolerance[torch.float32] = (2e-6, 2e-6)
rope.tolerance[torch.bfloat16] = (4e-2, 1.6e-2)
rope.tolerance[torch.float16] = (5e-3, 2e-3)
