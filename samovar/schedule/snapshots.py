"""Snapshots: copies of recurrent states by the prefix they come after, so that models with such states find prefixes, too.

Keys and values of a prefix are there token by token; a recurrent state is only ever that of all tokens so far. To begin
behind a cached prefix, a sequence needs a copy of the state as it was there. So a prompt's chunk ends where a copy is
worth keeping, and the step copies the sequence's row to one of ours after it ran. A snapshot has the name of the last
block before it (`PrefixCache`), which stands for the whole prefix. What a step saves is believed when its result is
booked, as blocks are; the row least recently used goes when another is needed.

Where others part from a prefix that is cached without a snapshot, one is made, as Marconi does (Pan et al., 2024).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samovar.schedule.options import SchedulerOptions
from samovar.schedule.prefix_cache import PrefixCache

if TYPE_CHECKING:
    from samovar.schedule.live import LiveSequence


@dataclass(slots=True, eq=False)
class Snapshot:
    """A row whose content is known: the state after the prefix named `digest`."""

    row: int
    digest: bytes
    num_pins: int = 0
    """Sequences that will begin from it in a step to come."""
    was_used: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PlannedSave:
    """A copy that a step makes: of the state of `sequence` after `num_tokens` tokens, into `row`."""

    sequence: LiveSequence
    stay: int
    slot: int
    num_tokens: int
    row: int
    is_rolling: bool
    """It takes the place of the sequence's one before."""


class SnapshotRows:
    """`count` rows from `first` on, and the index of what they hold, least recently used first."""

    def __init__(self, first: int, count: int) -> None:
        self._free = list(range(first, first + count))[::-1]
        self._index: OrderedDict[bytes, Snapshot] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Rows that hold nothing and that no launched step writes to."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Rows whose content is known."""
        return len(self._index)

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._index

    def reserve(self) -> int | None:
        """A row to write to: its content, if any, is forgotten. None if sequences are about to begin from all of them."""
        if not self._free:
            victim = next((s for s in self._index.values() if not s.num_pins), None)
            if victim is None:
                return None
            self.drop(victim)
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """A reserved row will not be published."""
        self._free.append(row)

    def publish(self, row: int, digest: bytes) -> Snapshot | None:
        """Enter a reserved row. If its content is there already the row is given back, and nothing is entered."""
        if digest in self._index:
            self._index.move_to_end(digest)
            self._free.append(row)
            return None
        found = self._index[digest] = Snapshot(row, digest)
        return found

    def pin(self, digest: bytes) -> Snapshot:
        """The snapshot of a known digest, which stays until `unpin`."""
        found = self._index[digest]
        self._index.move_to_end(digest)
        found.num_pins += 1
        found.was_used = True
        return found

    def unpin(self, snapshot: Snapshot) -> None:
        """One sequence less wants it."""
        snapshot.num_pins -= 1
        if not snapshot.num_pins and self._index.get(snapshot.digest) is not snapshot:
            self._free.append(snapshot.row)

    def drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot, if that has not happened; its row is free once nobody wants it."""
        if self._index.get(snapshot.digest) is snapshot:
            del self._index[snapshot.digest]
            if not snapshot.num_pins:
                self._free.append(snapshot.row)

    def drop_all(self) -> None:
        """Forget all contents."""
        for snapshot in list(self._index.values()):
            self.drop(snapshot)


class Snapshots:
    """Decides which snapshots a scheduler's steps make, and from which ones its sequences begin."""

    def __init__(self, options: SchedulerOptions, num_rows: int, cache: PrefixCache) -> None:
        self._num_rows, self._cache, self._size = num_rows, cache, options.block_size
        self._rules, self._can_cut = options.snapshot_rules, options.enable_chunked_prefill
        # Rows of running sequences come first, and the spare one: see `cache.state_pool`.
        self.rows = SnapshotRows(options.max_num_seqs + 1, num_rows)
        self._decode_interval = -(-self._rules.decode_interval // self._size) * self._size

    # Beginning from one.

    def known_blocks(self, sequence: LiveSequence, num_blocks: int) -> int:
        """How many of a sequence's first `num_blocks` cached blocks it can begin behind. Notes where it leaves the rest."""
        digests = sequence.block_hashes
        known = next((i for i in range(num_blocks, 0, -1) if digests[i - 1] in self.rows), 0)
        sequence.branch = num_blocks * self._size
        return known

    def begin(self, sequence: LiveSequence) -> None:
        """The sequence was given the blocks up to `num_computed_tokens`: keep the state for it."""
        start = sequence.saved = sequence.num_computed_tokens
        if start:
            sequence.restored = self.rows.pin(sequence.block_hashes[start // self._size - 1])

    def restore(self, sequence: LiveSequence, copies: list[tuple[int, int]]) -> None:
        """Its first chunk is in a step: note what must be copied before."""
        if sequence.restored is not None:
            assert sequence.slot is not None
            copies.append((sequence.restored.row, sequence.slot))
            self.leave(sequence)

    def leave(self, sequence: LiveSequence) -> None:
        """What was kept for its beginning is not needed any more."""
        if sequence.restored is not None:
            self.rows.unpin(sequence.restored)
            sequence.restored = None

    # Making them.

    def cut(self, sequence: LiveSequence, count: int) -> int:
        """How many of the next `count` tokens to compute, so that the chunk ends where a snapshot is worth it."""
        start = sequence.num_computed_tokens
        end = start + count
        if sequence.parent.root is None or not self._num_rows or not self._can_cut:
            return count
        point = next((p for p in self._points(sequence) if start < p <= end), None)
        if point is not None:
            return point - start
        border = end // self._size * self._size
        return border - start if border - sequence.saved >= self._rules.interval and border > start else count

    def save(self, sequence: LiveSequence, saves: list[PlannedSave]) -> None:
        """A chunk was added to a step: plan a snapshot if it ends where one is worth it."""
        end = sequence.num_computed_tokens
        if sequence.parent.root is None or not self._num_rows or end % self._size:
            return
        if end in self._points(sequence) or end - sequence.saved >= self._rules.interval:
            self._plan(sequence, saves, is_rolling=False)

    def roll(self, sequences: SequenceOf[LiveSequence], saves: list[PlannedSave]) -> None:
        """`sequences` decode in a step, and have come to `num_computed_tokens` then: keep the latest state of each."""
        for sequence in sequences[: int(self._num_rows * self._rules.decode_share)]:
            if sequence.num_computed_tokens % self._decode_interval == 0:
                parent = sequence.parent
                if parent.root is not None and not parent.is_private:
                    self._plan(sequence, saves, is_rolling=True)

    def settle(self, saves: SequenceOf[PlannedSave], failed: Container[int]) -> None:
        """The step with these saves is over: believe those of sequences that still hold what they held then."""
        for save in saves:
            sequence, root = save.sequence, save.sequence.parent.root
            if save.stay != sequence.stay or save.slot in failed or root is None:
                self.rows.give_back(save.row)
                continue
            num_blocks = save.num_tokens // self._size
            self._cache.extend(sequence.block_hashes, root, sequence.token_ids, num_blocks)
            found = self.rows.publish(save.row, sequence.block_hashes[num_blocks - 1])
            if save.is_rolling:
                before, sequence.rolling = sequence.rolling, found
                if before is not None and not before.was_used:
                    self.rows.drop(before)

    def _points(self, sequence: LiveSequence) -> list[int]:
        """Where snapshots of its prompt are worth a chunk that ends there, ascending."""
        size, known = self._size, sequence.num_prompt_tokens
        # What the first choice spares is spared for the others, too.
        gain = self._rules.least_gain // sequence.request.params.n
        wanted = sorted({sequence.branch, max(known - self._rules.margin, 0) // size * size})
        points, last = list[int](), sequence.saved
        for point in wanted:
            if point - last >= max(gain, 1) and not self._is_known(sequence, point):
                points.append(point)
                last = point
        return points

    def _is_known(self, sequence: LiveSequence, point: int) -> bool:
        root, num_blocks = sequence.parent.root, point // self._size
        assert root is not None
        self._cache.extend(sequence.block_hashes, root, sequence.token_ids, num_blocks)
        return sequence.block_hashes[num_blocks - 1] in self.rows

    def _plan(self, sequence: LiveSequence, saves: list[PlannedSave], *, is_rolling: bool) -> None:
        row, slot = self.rows.reserve(), sequence.slot
        assert slot is not None
        if row is not None:
            end = sequence.saved = sequence.num_computed_tokens
            saves.append(PlannedSave(sequence, sequence.stay, slot, end, row, is_rolling))
