"""Block, BlockPool: the fixed set of cache blocks, with reference counts, an LRU free list and the index of contents.

A block is *used* (some sequence holds it), *cached* (nobody holds it, its content is in the index and can be shared
again) or *blank*. Cached and blank blocks are both free: blank ones are handed out first, then the cached one that
was released longest ago. Every operation is O(1) per block.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf


class Block:
    """One fixed-size piece of the cache. `digest` names its content once that is complete and published."""

    __slots__ = ("digest", "following", "id", "preceding", "ref_count")

    def __init__(self, id: int) -> None:
        self.id = id
        self.ref_count = 0
        self.digest: bytes | None = None
        self.preceding: Block = self
        self.following: Block = self


class BlockPool:
    """Owns every block. Raises `RuntimeError` when asked for the impossible: those are bugs of the caller."""

    def __init__(self, num_blocks: int) -> None:
        self._blocks = [Block(i) for i in range(num_blocks)]
        self._index: dict[bytes, Block] = {}
        self._ring = Block(-1)  # Sentinel of the circular free list: `following` is handed out next.
        self._num_free = 0
        for block in self._blocks:
            self._link_last(block)

    @property
    def num_blocks(self) -> int:
        """Blocks in all."""
        return len(self._blocks)

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self._num_free

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds, each counted once."""
        return len(self._blocks) - self._num_free

    @property
    def num_published(self) -> int:
        """Blocks whose content is in the index, held or not."""
        return len(self._index)

    @property
    def usage(self) -> float:
        """Share of the blocks that are held, 0.0 to 1.0."""
        return self.num_used / len(self._blocks) if self._blocks else 0.0

    def allocate(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each; forgets the cached content of those that had one."""
        if count > self._num_free:
            raise RuntimeError(f"{count} blocks wanted, {self._num_free} free")
        ids = []
        for _ in range(count):
            block = self._ring.following
            self._unlink(block)
            if block.digest is not None:
                del self._index[block.digest]
                block.digest = None
            block.ref_count = 1
            ids.append(block.id)
        return ids

    def share(self, ids: Iterable[int]) -> None:
        """Add one reference to each block; a cached one becomes used again."""
        for i in ids:
            block = self._blocks[i]
            if block.ref_count == 0:
                self._unlink(block)
            block.ref_count += 1

    def free(self, ids: SequenceOf[int]) -> None:
        """Drop one reference of each block of a table, last first, so that a chain is evicted from its end."""
        for i in reversed(ids):
            block = self._blocks[i]
            if block.ref_count <= 0:
                raise RuntimeError(f"block {i} freed twice")
            block.ref_count -= 1
            if block.ref_count == 0:
                if block.digest is None:
                    self._link_first(block)
                else:
                    self._link_last(block)

    def find(self, digest: bytes) -> int | None:
        """The block that holds the content named `digest`."""
        block = self._index.get(digest)
        return None if block is None else block.id

    def publish(self, id: int, digest: bytes) -> None:
        """Enter a held, complete block into the index. A content that is there already keeps its first block."""
        block = self._blocks[id]
        if block.ref_count <= 0:
            raise RuntimeError(f"block {id} published while nobody holds it")
        if block.digest is None and digest not in self._index:
            self._index[digest] = block
            block.digest = digest

    def unpublish_all(self) -> None:
        """Forget every content. Held blocks stay with their holders."""
        for block in self._index.values():
            block.digest = None
        self._index.clear()

    def ref_count(self, id: int) -> int:
        """References to the block; 0 when it is free."""
        return self._blocks[id].ref_count

    def num_free_among(self, ids: Iterable[int]) -> int:
        """How many of these blocks nobody holds now: `share` takes that many from `num_free`."""
        return sum(self._blocks[i].ref_count == 0 for i in ids)

    def num_held_once(self, ids: Iterable[int]) -> int:
        """How many of these blocks become free when their one holder gives them back."""
        return sum(self._blocks[i].ref_count == 1 for i in ids)

    def free_ids(self) -> list[int]:
        """Ids of the free blocks, the next to be handed out first. For tests and diagnosis: O(free blocks)."""
        ids = []
        block = self._ring.following
        while block is not self._ring:
            ids.append(block.id)
            block = block.following
        return ids

    def _link_first(self, block: Block) -> None:
        self._link(block, self._ring, self._ring.following)

    def _link_last(self, block: Block) -> None:
        self._link(block, self._ring.preceding, self._ring)

    def _link(self, block: Block, preceding: Block, following: Block) -> None:
        block.preceding, block.following = preceding, following
        preceding.following = following.preceding = block
        self._num_free += 1

    def _unlink(self, block: Block) -> None:
        block.preceding.following = block.following
        block.following.preceding = block.preceding
        block.preceding = block.following = block
        self._num_free -= 1
