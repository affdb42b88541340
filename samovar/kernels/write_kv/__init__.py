"""Write a step's keys and values into the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op
from samovar.kernels.write_kv.rows import as_bytes, encode


@op(
    prefer=("triton", "torch_rows"),
    mutates=("key_cache", "value_cache", "key_scales", "value_scales"),
)
def write_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """cache[slot // block_size, slot % block_size] = row for every row, stored as the cache does it (see `rows`).

    k, v [tokens, kv_heads, head_dim]; caches [num_blocks, block_size, kv_heads, head_dim, or bytes of packed codes] in any
    memory order; slot_mapping [tokens] int64, block id * block_size + offset, no slot twice. A row with a negative slot is
    skipped. Scales are those of heads, float32 [kv_heads], which are read, or of rows [num_blocks, block_size, kv_heads],
    which are written.
    """
    kept = slot_mapping >= 0
    slots, block_size = slot_mapping[kept], key_cache.shape[1]
    at = (slots // block_size, slots % block_size)
    for x, cache, scales in ((k, key_cache, key_scales), (v, value_cache, value_scales)):
        codes, row_scales = encode(x[kept], cache, scales)
        as_bytes(cache)[at] = as_bytes(codes)
        if scales is not None and row_scales is not None:
            scales[at] = row_scales.to(scales.dtype)


@write_kv.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, heads, dim, skipped in ((3, 2, 16, 1), (1, 3, 64, 0), (40, 1, 8, 7), (0, 2, 16, 0)):
        k, v = torch.randn(2, tokens, heads, dim)
        keys, values = torch.randn(2, 12, 4, heads, dim)
        slots = torch.randperm(48)[:tokens]
        slots[torch.randperm(tokens)[:skipped]] = -1
        yield k, v, keys, values, slots
    head_major = torch.randn(2, 5, 3, 4, 8).transpose(2, 3)
    yield *torch.randn(2, 6, 3, 8), *head_major, torch.tensor([19, -1, 0, 4, -1, 3])


write_kv.tolerance[torch.float32] = (0.0, 0.0)
write_kv.tolerance[torch.bfloat16] = (0.0, 0.0)
write_kv.tolerance[torch.float16] = (0.0, 0.0)
