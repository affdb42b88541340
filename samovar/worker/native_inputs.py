"""StepInputs: the integers of a step where the CPU library reads them. Steps share the memory; nothing is made anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from samovar.core.step import FED, DecodeSequences, ScheduledSequence
from samovar.native.abi import Count, CStep
from samovar.sample.pipeline import SampleRows
from samovar.worker.block_tables import BlockTables, Ints
from samovar.worker.step_builder import BuiltStep


class StepInputs:
    """The structure `step`, and what it points to. `argmax_ids` int64 is where the library writes the most likely ids.

    There is memory for `max_tokens` and `max_sequences`, and more once a step has more.
    """

    def __init__(self, max_tokens: int, max_sequences: int, block_size: int) -> None:
        self.step = CStep(block_size=block_size)
        self.num_tokens = self.num_rows = 0
        self._tables = np.zeros(0, np.int32)
        self._make_room(max_tokens, max_sequences)
        self._slots: list[int] = []
        self._later: list[Ints] = []
        self._slot_array = np.zeros(0, np.int64)

    def load(self, built: BuiltStep) -> None:
        """Any step, as a builder made it."""
        spans = built.spans
        tokens, sequences, rows = len(built.token_ids), len(spans.new_tokens), len(built.sample_rows)
        self._begin(tokens, sequences, rows)
        self._token_ids[:tokens] = built.token_ids.numpy()
        self._positions[:tokens] = built.positions.numpy()
        self._mapping[:tokens] = built.slot_mapping.numpy()
        self._row_ids[:rows] = built.sample_rows.numpy()
        self._first_rows[:sequences], self._first_rows[sequences] = built.first_rows, tokens
        self._totals[:sequences] = spans.total_tokens
        self._attends[:rows] = np.searchsorted(built.first_rows, self._row_ids[:rows], side="right") - 1
        tables = spans.block_tables.numpy()
        self._table(*tables.shape)[:] = tables

    def load_decode(
        self,
        sequences: Sequence[ScheduledSequence],
        tables: BlockTables,
        last_sampled: Ints,
        vocab_size: int,
        num_rounds: int = 1,
    ) -> SampleRows | None:
        """A step of one token a sequence, all of which sample: checked here, without a builder, and its new blocks are
        appended to `tables`. None, and no change, for another kind of step, or if a row must be refused.

        With more than one round `advance` gives the next."""
        columns = sequences if isinstance(sequences, DecodeSequences) else columns_of(sequences, vocab_size)
        if columns is None or min(columns.token_ids) < FED or max(columns.token_ids) >= vocab_size:
            return None
        if columns.slots != self._slots:
            self._slots, self._slot_array = columns.slots, np.array(columns.slots, np.int64)
        slots, totals, count = self._slot_array, np.array(columns.totals, np.int64), len(columns.slots)
        behind = num_rounds - 1
        if not _extend(tables, columns, slots, totals + behind if behind else totals):
            return None
        self._begin(count, count, count)
        ids, positions = self._token_ids[:count], self._positions[:count]
        num_fed = columns.token_ids.count(FED)
        if num_fed == count:
            ids[:] = last_sampled[slots]
        else:
            ids[:] = columns.token_ids
            if num_fed:
                np.copyto(ids, last_sampled[slots], where=ids == FED)
        np.subtract(totals, 1, out=positions)
        self._mapping[:count] = tables.slot_mapping(slots, positions)
        self._first_rows[: count + 1] = self._counting[: count + 1]
        self._totals[:count] = totals
        width = -(-(max(columns.totals) + behind) // tables.block_size)
        self._table(count, width)[:] = tables.rows[slots, :width]
        if behind:
            later = positions + np.arange(1, num_rounds)[:, None]
            self._later = list(tables.slot_mapping(np.broadcast_to(slots, later.shape), later))[::-1]
        return SampleRows(slots, totals)

    def advance(self) -> None:
        """The next round of a decode step: every sequence goes on with its most likely token."""
        count = self.num_tokens
        self._token_ids[:count] = self.argmax_ids[:count]
        self._positions[:count] += 1
        self._totals[:count] += 1
        self._mapping[:count] = self._later.pop()

    def _begin(self, tokens: int, sequences: int, rows: int) -> None:
        """Note the sizes of a step."""
        if tokens > len(self._token_ids) or sequences >= len(self._first_rows):
            self._make_room(max(tokens, len(self._token_ids)), max(sequences, len(self._totals)))
        self.num_tokens, self.num_rows = tokens, rows
        counts = self.step.counts
        counts[Count.TOKENS], counts[Count.ROWS] = tokens, rows
        self.step.num_sequences = sequences

    def _table(self, sequences: int, width: int) -> NDArray[np.int32]:
        """Room for the block ids of a step."""
        size = sequences * width
        if size > len(self._tables):
            self._tables = np.zeros(2 * size, np.int32)
            self.step.tables = self._tables.ctypes.data
        self.step.table_width = width
        return self._tables[:size].reshape(sequences, width)

    def _make_room(self, tokens: int, sequences: int) -> None:
        self._token_ids, self._positions, self._mapping, self.argmax_ids, self._row_ids = (
            np.zeros(tokens, np.int64) for _ in range(5)
        )
        self._counting = np.arange(sequences + 1, dtype=np.int32)
        self._first_rows = np.zeros(sequences + 1, np.int32)
        self._totals = np.zeros(sequences, np.int32)
        self._attends = np.zeros(tokens, np.int32)
        step = self.step
        step.token_ids, step.positions = self._token_ids.ctypes.data, self._positions.ctypes.data
        step.slots, step.row_ids = self._mapping.ctypes.data, self._row_ids.ctypes.data
        step.first_rows, step.totals = self._first_rows.ctypes.data, self._totals.ctypes.data
        step.attends, step.argmax_ids = self._attends.ctypes.data, self.argmax_ids.ctypes.data


def columns_of(sequences: Sequence[ScheduledSequence], vocab_size: int) -> DecodeSequences | None:
    """Rows that were made one by one, as columns; None if they are not all of that kind."""
    if not sequences or not all(s.num_new_tokens == 1 and s.samples and not s.num_prompt_logprobs for s in sequences):
        return None
    # A negative id would be taken for one that the worker knows: this one is refused.
    ids = [FED if not s.token_ids else s.token_ids[0] if s.token_ids[0] >= 0 else vocab_size for s in sequences]
    blocks = {row: s.new_blocks for row, s in enumerate(sequences) if s.new_blocks}
    return DecodeSequences([s.slot for s in sequences], [s.position_of_sample for s in sequences], ids, blocks)


def _extend(tables: BlockTables, columns: DecodeSequences, slots: Ints, totals: Ints) -> bool:
    """Append new blocks; False, and no change, if some sequence's tokens have no room."""
    growing = [(columns.slots[row], blocks) for row, blocks in columns.new_blocks.items()]
    before = [int(tables.counts[slot]) for slot, _ in growing]
    refused = [slot for slot, blocks in growing if tables.extend(slot, blocks) is not None]
    if not refused and tables.holds(slots, totals):
        return True
    for (slot, _), first in zip(growing, before, strict=True):
        tables.counts[slot] = first
    return False
