"""BlockTables: which cache blocks each slot holds, on the host, where every number of a step is checked before use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from samovar.core.step import ScheduledSequence

Ints = NDArray[np.int64]


class BlockTables:
    """`rows` int64 [num_slots, width] holds block ids; the first `counts[slot]` of a row are valid."""

    def __init__(self, num_slots: int, *, max_model_len: int, block_size: int, num_blocks: int) -> None:
        self.block_size, self.num_blocks, self.max_model_len = block_size, num_blocks, max_model_len
        self.rows = np.zeros((num_slots, -(-max_model_len // block_size) + 1), np.int64)
        self.counts = np.zeros(num_slots, np.int64)

    @property
    def width(self) -> int:
        """Most blocks of one sequence."""
        return int(self.rows.shape[1])

    def free(self, slot: int) -> None:
        """Empty the table of a slot that its sequence gave up."""
        self.counts[slot] = 0

    def append(self, sequence: ScheduledSequence) -> str | None:
        """Extend a slot's table; a complaint if the result cannot hold the sequence's tokens."""
        return self.extend(sequence.slot, sequence.new_blocks) or self.complaint(sequence)

    def extend(self, slot: int, blocks: Sequence[int]) -> str | None:
        """Append `blocks` to a slot's table; a complaint, and no change, if they cannot be."""
        first = int(self.counts[slot])
        end = first + len(blocks)
        if end > self.width:
            return f"{end} cache blocks are more than a sequence may have ({self.width})"
        if blocks:
            if min(blocks) < 0 or max(blocks) >= self.num_blocks:
                return f"a cache block is outside 0..{self.num_blocks - 1}"
            self.rows[slot, first:end] = blocks
            self.counts[slot] = end
        return None

    def complaint(self, sequence: ScheduledSequence) -> str | None:
        """Why the sequence's tokens do not fit its table; None if they do."""
        total, end = sequence.start + sequence.num_new_tokens, int(self.counts[sequence.slot])
        if total > self.max_model_len or sequence.position_of_sample > self.max_model_len:
            return f"{total} tokens are more than the context of {self.max_model_len}"
        if total > end * self.block_size:
            return f"{total} tokens do not fit into {end} cache blocks of {self.block_size}"
        return None

    def holds(self, slots: Ints, totals: Ints) -> bool:
        """Whether each of `slots` has room for its `totals` tokens: `complaint` for many at once."""
        return bool((totals <= np.minimum(self.counts[slots] * self.block_size, self.max_model_len)).all())

    def slot_mapping(self, slots: Ints, positions: Ints) -> Ints:
        """Where the tokens at `positions` of `slots` (one each) have their K/V: block id * block_size + offset."""
        return self.rows[slots, positions // self.block_size] * self.block_size + positions % self.block_size


def token_ids_of(sequences: Sequence[ScheduledSequence]) -> tuple[Ints, Ints]:
    """All ids in a row, 0 where the device knows the token and the host does not; and where sequences begin."""
    ids = chain.from_iterable(s.token_ids if not s.feeds_last_sample else (*s.token_ids, 0) for s in sequences)
    counts = np.fromiter((s.num_new_tokens for s in sequences), np.int64, len(sequences))
    first_rows = np.concatenate((np.zeros(1, np.int64), counts.cumsum()))
    return np.fromiter(ids, np.int64, int(first_rows[-1])), first_rows


def outside_vocabulary(token_ids: Ints, first_rows: Ints, vocab_size: int) -> set[int]:
    """Which sequences have an id that the model does not know."""
    is_bad = (token_ids < 0) | (token_ids >= vocab_size)
    if not is_bad.any():
        return set()
    return set((np.searchsorted(first_rows, np.flatnonzero(is_bad), side="right") - 1).tolist())


@dataclass(frozen=True, slots=True)
class Admitted:
    """The sequences of a step that can run, and slot -> message for those that cannot.

    `token_ids` [tokens] are theirs in a row, sequence i's from `first_rows[i]` to `first_rows[i + 1]`.
    """

    sequences: list[ScheduledSequence]
    failed: dict[int, str]
    token_ids: Ints
    first_rows: Ints


def admit(tables: BlockTables, sequences: Sequence[ScheduledSequence], vocab_size: int) -> Admitted:
    """Append every sequence's new blocks and check all its numbers."""
    failed: dict[int, str] = {}
    kept = []
    for sequence in sequences:
        complaint = tables.append(sequence)
        if complaint is None:
            kept.append(sequence)
        else:
            failed[sequence.slot] = complaint
    token_ids, first_rows = token_ids_of(kept)
    if bad := outside_vocabulary(token_ids, first_rows, vocab_size):
        for index in bad:
            failed[kept[index].slot] = f"a token id is outside the vocabulary of {vocab_size}"
        kept = [sequence for index, sequence in enumerate(kept) if index not in bad]
        token_ids, first_rows = token_ids_of(kept)
    return Admitted(kept, failed, token_ids, first_rows)
