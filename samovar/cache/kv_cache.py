"""KVCache: the keys and values of every layer, in blocks. Which sequence owns which block is not known here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samovar.core.cache_spec import CacheSpec


class KVCache:
    """Two tensors per layer, each [num_blocks, block_size, kv_heads, head_dim] of `dtype`.

    The memory is not touched on creation: on a CPU, pages that no sequence has written to cost nothing.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for spec in specs:
            shape = (num_blocks, block_size, spec.num_kv_heads, spec.head_dim)
            keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            self.layers.append((keys, values))

    @property
    def nbytes(self) -> int:
        """Bytes reserved, touched or not."""
        return sum(keys.nbytes + values.nbytes for keys, values in self.layers)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in every layer, as (source, target). All sources are read before any target is written."""
        if not pairs:
            return
        sources = torch.tensor([source for source, _ in pairs], device=self.layers[0][0].device)
        targets = torch.tensor([target for _, target in pairs], device=self.layers[0][0].device)
        for layer in self.layers:
            for tensor in layer:
                tensor[targets] = tensor[sources]
