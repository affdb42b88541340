"""KVCache: the keys and values of every layer, in blocks. Which sequence owns which block is not known here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samovar.core.cache_spec import CacheSpec
from samovar.kernels.write_kv.layout import layer_cache


class KVCache:
    """Two tensors per layer, each [num_blocks, block_size, kv_heads, head_dim] of `dtype`; where every row has a scale,
    two more, each [num_blocks, block_size, kv_heads]. Packed formats have bytes in place of `dtype`.

    `is_head_major` says how they lie in memory: a block's tokens of one head together, as GPU kernels read them (the
    default there), or a token's heads together. Scales stand behind the rows of their block and head, or each behind its
    row. Only strides differ, so nobody may assume contiguity. The memory is not touched on creation: on a CPU, pages that
    no sequence has written to cost nothing.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        is_head_major: bool | None = None,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        if is_head_major is None:
            is_head_major = torch.device(device).type != "cpu"  # "meta" stands in for a GPU
        self._memory: list[torch.Tensor] = []
        self.layers: list[tuple[torch.Tensor, ...]] = []
        for spec in specs:
            memory, tensors = layer_cache(spec, (num_blocks, block_size), dtype, device, is_head_major)
            self._memory += memory
            self.layers.append(tensors)

    @property
    def nbytes(self) -> int:
        """Bytes reserved, touched or not."""
        return sum(tensor.nbytes for tensor in self._memory)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, in every layer, as (source, target). All sources are read before any target is written.

        On a GPU it is queued: the host waits for nothing.
        """
        if not pairs:
            return
        device = self._memory[0].device
        numbers = torch.tensor(pairs, pin_memory=device.type == "cuda")
        sources, targets = numbers.to(device, non_blocking=True).unbind(1)
        for tensor in self._memory:
            whole = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # torch copies no float8 on CPUs
            whole.index_copy_(0, targets, whole.index_select(0, sources))
