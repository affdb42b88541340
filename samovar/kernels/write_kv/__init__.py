"""Write a step's keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op


@op(mutates=("key_cache", "value_cache"), plain_is_best=("cpu",))
def write_kv(
    k: torch.Tensor, v: torch.Tensor, key_cache: torch.Tensor, value_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """cache[slot] = row for every row, converted to the cache's dtype.

    k, v [tokens, kv_heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim]; slot_mapping [tokens]
    int64, block id * block_size + offset, no slot twice.
    """
    key_cache.flatten(0, 1)[slot_mapping] = k.to(key_cache.dtype)
    value_cache.flatten(0, 1)[slot_mapping] = v.to(value_cache.dtype)


@write_kv.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, heads, dim in ((3, 2, 16), (1, 3, 64), (40, 1, 8)):
        k, v = torch.randn(2, tokens, heads, dim)
        keys, values = torch.randn(2, 12, 4, heads, dim)
        yield k, v, keys, values, torch.randperm(48)[:tokens]


write_kv.tolerance[torch.float32] = (0.0, 0.0)
write_kv.tolerance[torch.bfloat16] = (0.0, 0.0)
write_kv.tolerance[torch.float16] = (0.0, 0.0)
