"""CacheGroup: layers that share one block table per sequence.

Today every layer is in one group: full and sliding layers index the same table, and a sliding layer simply does not
read blocks that left its window. Layers whose cache grows by another rule (latent with another page size, recurrent
state) become further groups here, each with a table of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from samovar.core.cache_spec import CacheSpec


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """`layers` are indices into the model's cache specs; `block_size` in tokens."""

    layers: tuple[int, ...]
    block_size: int

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks that hold the K/V of `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)


def group_layers(specs: SequenceOf[CacheSpec], block_size: int) -> CacheGroup:
    """The one group that holds every layer: full and sliding K/V both grow by one slot per token."""
    return CacheGroup(tuple(range(len(specs))), block_size)
