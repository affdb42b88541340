"""What stands between the joint projection and attention, in one op: q/k norm, rotary embedding, the K/V write."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op
from samovar.kernels.rms_norm import rms_norm
from samovar.kernels.rope import rope
from samovar.kernels.write_kv import write_kv


@op(
    prefer=("triton",),
    mutates=("key_cache", "value_cache", "key_scales", "value_scales"),
    plain_is_best=("cpu",),
)
def rope_write_kv(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    heads: int,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Norm (where a weight is given) and turn queries and keys, write keys and values; returns the queries.

    qkv [tokens, heads + 2 * kv_heads, head_dim]: `heads` of queries, then the keys', then the values'. cos, sin as in
    `rope`; caches, scales and slot_mapping as in `write_kv`, but no packed codes; q_weight, k_weight [head_dim] as in
    `rms_norm`, over each head.
    The result [tokens, heads, head_dim] is contiguous.
    """
    kv_heads = key_cache.shape[2]
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    q = q if q_weight is None else rms_norm(q, q_weight, eps)
    k = k if k_weight is None else rms_norm(k, k_weight, eps)
    q, k = rope(q, k, cos, sin)
    write_kv(k, v, key_cache, value_cache, slot_mapping, key_scales, value_scales)
    return q


@rope_write_kv.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    cases = (
        # tokens, heads, kv_heads, head_dim, rotary_dim, q norm, k norm
        (3, 4, 2, 16, 16, True, True),
        (1, 9, 3, 64, 64, False, False),
        (5, 16, 8, 128, 128, True, True),
        (9, 7, 1, 80, 32, True, True),
        (6, 2, 2, 96, 96, False, True),
        (2, 3, 1, 20, 8, True, False),
        (0, 4, 2, 16, 16, True, True),
    )
    for tokens, heads, kv_heads, dim, rotary, has_q_norm, has_k_norm in cases:
        angle = torch.rand(tokens, 1, rotary // 2) * 6
        cos, sin = angle.cos(), angle.sin()
        tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        caches = torch.randn(2, 6, kv_heads, 4, dim).transpose(2, 3)
        slots = torch.randperm(24)[:tokens]
        slots[2::3] = -1
        weights = (torch.randn(dim) / 4 + 1 if normed else None for normed in (has_q_norm, has_k_norm))
        yield torch.randn(tokens, heads + 2 * kv_heads, dim), *tables, *caches, slots, *weights, 1e-6, heads


rope_write_kv.tolerance[torch.float32] = (4e-6, 4e-6)
rope_write_kv.tolerance[torch.bfloat16] = (4e-2, 1.6e-2)
rope_write_kv.tolerance[torch.float16] = (5e-3, 2e-3)
