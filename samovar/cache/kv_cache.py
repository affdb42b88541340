"""KVCache: the keys and values of every layer, in blocks. Which sequence owns which block is not known here."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samovar.core.cache_spec import CacheSpec


class KVCache:
    """Two tensors per layer, each [num_blocks, block_size, kv_heads, head_dim] of `dtype`; a row's scale, where there is
    one, stands behind it.

    `is_head_major` says how they lie in memory: a block's tokens of one head together, as GPU kernels read them (the
    default there), or a token's heads together. Only strides differ, so nobody may assume contiguity. The memory is not
    touched on creation: on a CPU, pages that no sequence has written to cost nothing.
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
        self.layers: list[tuple[torch.Tensor, torch.Tensor]] = []
        for spec in specs:
            tokens_and_heads = (spec.num_kv_heads, block_size) if is_head_major else (block_size, spec.num_kv_heads)
            shape = (num_blocks, *tokens_and_heads, spec.row_bytes // dtype.itemsize)
            keys, values = (torch.empty(shape, dtype=dtype, device=device) for _ in range(2))
            self._memory += (keys, values)
            self.layers.append((keys.transpose(1, 2), values.transpose(1, 2)) if is_head_major else (keys, values))

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
            tensor.index_copy_(0, targets, tensor.index_select(0, sources))
