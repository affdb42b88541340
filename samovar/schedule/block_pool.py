"""BlockPool: the fixed set of cache blocks, with reference counts, an LRU free list and the index of contents.

A block is *used* (some sequence holds it), *cached* (nobody holds it, its content is in the index and can be shared
again) or *blank*. Cached and blank blocks are both free: blank ones are handed out first, then the cached one that
was released longest ago. Every operation is O(1) per block.

Blocks are numbers and their attributes are arrays: a pool may have millions, and objects would take seconds to make
and a pause whenever the garbage collector looks at them.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf


class BlockPool:
    """Owns every block. Raises `RuntimeError` when asked for the impossible: those are bugs of the caller."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_free = num_blocks
        self._ref_counts = array("i", [0]) * num_blocks
        self._digests: list[bytes | None] = [None] * num_blocks
        """Name of each block's content, once that is complete and published."""
        self._index: dict[bytes, int] = {}
        # The circular free list, linked by block id. Two nodes are no blocks: `_ring`, where it begins and ends, and
        # `_rest`, which stands for all the blocks from `_num_touched` on: those were never handed out.
        self._ring, self._rest = num_blocks, num_blocks + 1
        self._num_touched = 0
        self._following = array("i", [0]) * (num_blocks + 2)
        self._preceding = array("i", [0]) * (num_blocks + 2)
        self._following[self._ring] = self._preceding[self._ring] = self._ring
        if num_blocks:
            self._link(self._rest, self._ring)

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return self._num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds, each counted once."""
        return self._num_blocks - self._num_free

    @property
    def num_published(self) -> int:
        """Blocks whose content is in the index, held or not."""
        return len(self._index)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0.0 to 1.0."""
        return self.num_used / self._num_blocks if self._num_blocks else 0.0

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each; forgets the cached content of those that had one."""
        if count > self._num_free:
            raise RuntimeError(f"{count} blocks wanted, {self._num_free} free")
        ids = []
        for _ in range(count):
            block = self._following[self._ring]
            if block == self._rest:
                block = self._touch()
            else:
                self._unlink(block)
            digest = self._digests[block]
            if digest is not None:
                del self._index[digest]
                self._digests[block] = None
            self._ref_counts[block] = 1
            ids.append(block)
        self._num_free -= count
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """Add one reference to each block; a cached one becomes used again."""
        for block in ids:
            if self._ref_counts[block] == 0:
                if block >= self._num_touched:
                    raise RuntimeError(f"block {block} shared before it was ever handed out")
                self._unlink(block)
                self._num_free -= 1
            self._ref_counts[block] += 1

    def free(self, ids: SequenceOf[int]) -> None:
        """Drop one reference of each block of a table, last first, so that a chain is evicted from its end."""
        for block in reversed(ids):
            count = self._ref_counts[block] - 1
            if count < 0:
                raise RuntimeError(f"block {block} freed twice")
            self._ref_counts[block] = count
            if count == 0:
                is_blank = self._digests[block] is None
                self._link(block, self._following[self._ring] if is_blank else self._ring)
                self._num_free += 1

    def find(self, digest: bytes) -> int | None:
        """The block that holds the content named `digest`."""
        return self._index.get(digest)

    def publish(self, id: int, digest: bytes) -> None:
        """Enter a held, complete block into the index. A content that is there already keeps its first block."""
        if self._ref_counts[id] <= 0:
            raise RuntimeError(f"block {id} published while nobody holds it")
        if self._digests[id] is None and digest not in self._index:
            self._index[digest] = id
            self._digests[id] = digest

    def unpublish_all(self) -> None:
        """Forget every content. Held blocks stay with their holders."""
        for block in self._index.values():
            self._digests[block] = None
        self._index.clear()

    def ref_count(self, id: int) -> int:
        """References to the block; 0 when it is free."""
        return self._ref_counts[id]

    def num_free_among(self, ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds now: `share` takes that many from `num_free`."""
        return sum(self._ref_counts[block] == 0 for block in ids)

    def num_held_once(self, ids: Iterable[int]) -> int:
        """How many of these blocks become free when their one holder gives them back."""
        return sum(self._ref_counts[block] == 1 for block in ids)

    def free_ids(self) -> list[int]:
        """Ids of the free blocks, the next to be handed out first. For tests and diagnosis: O(free blocks)."""
        ids: list[int] = []
        node = self._following[self._ring]
        while node != self._ring:
            ids += range(self._num_touched, self._num_blocks) if node == self._rest else (node,)
            node = self._following[node]
        return ids

    def _touch(self) -> int:
        """The next block that was never handed out."""
        block = self._num_touched
        self._num_touched += 1
        if self._num_touched == self._num_blocks:
            self._unlink(self._rest)
        return block

    def _link(self, node: int, following: int) -> None:
        """Put a node into the free list before `following`."""
        preceding = self._preceding[following]
        self._preceding[node], self._following[node] = preceding, following
        self._following[preceding] = self._preceding[following] = node

    def _unlink(self, node: int) -> None:
        preceding, following = self._preceding[node], self._following[node]
        self._following[preceding], self._preceding[following] = following, preceding
