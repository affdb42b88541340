"""StepBuilder: the integers of a ScheduledStep -> the tensors of a ForwardBatch.

Block tables and the last sampled tokens live in buffers that outlast steps, one row per slot. Work per sequence is a few
list operations; work per token is NumPy's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.attention.base import Spans
from samovar.core.step import ScheduledSequence, ScheduledStep
from samovar.layers.batch import SequenceRows
from samovar.sample.pipeline import SampleRows
from samovar.worker.block_tables import Admitted, BlockTables, Ints, admit, token_ids_of


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """One step as tensors. `sequences` are those that run, in batch order; `failed` (slot -> message) do not.

    `token_ids`, `positions`, `slot_mapping` are int64 [num_tokens] on the device; `first_rows` [sequences] is where each
    sequence's rows begin. `sampling` are the sequences that sample, `sample_rows` their last rows; `sequence_rows` is for
    models with recurrent layers.
    """

    sequences: list[ScheduledSequence]
    failed: dict[int, str]
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    spans: Spans
    first_rows: Ints
    sampling: SampleRows
    sample_rows: torch.Tensor
    sequence_rows: SequenceRows | None = None


class StepBuilder:
    """Persistent per-slot buffers. `last_sampled` int64 [at least num_slots] holds what each slot sampled last."""

    def __init__(
        self,
        tables: BlockTables,
        last_sampled: torch.Tensor,
        *,
        vocab_size: int,
        has_states: bool = False,
    ) -> None:
        self.vocab_size, self.device, self._has_states = vocab_size, last_sampled.device, has_states
        self.last_sampled, self._tables = last_sampled, tables

    def free(self, slot: int) -> None:
        """Empty the block table of a slot that its sequence gave up."""
        self._tables.free(slot)

    def build(self, step: ScheduledStep) -> BuiltStep:
        """The tensors of `step`, after appending its new blocks. May hold no sequence at all."""
        return self._tensors(admit(self._tables, step.sequences, self.vocab_size))

    def rebuild(self, sequences: list[ScheduledSequence]) -> BuiltStep:
        """The tensors of some sequences of a step that was built before."""
        return self._tensors(Admitted(sequences, {}, *token_ids_of(sequences)))

    def _tensors(self, admitted: Admitted) -> BuiltStep:
        sequences, token_ids, first_rows = admitted.sequences, admitted.token_ids, admitted.first_rows
        count = len(sequences)
        slots = np.fromiter((s.slot for s in sequences), np.int64, count)
        starts = np.fromiter((s.start for s in sequences), np.int64, count)
        new_tokens = np.diff(first_rows)
        totals = starts + new_tokens
        positions = np.arange(len(token_ids)) + np.repeat(starts - first_rows[:-1], new_tokens)
        mapping = self._tables.slot_mapping(np.repeat(slots, new_tokens), positions)
        width = -(-int(totals.max(initial=0)) // self._tables.block_size)
        ids = self._to_device(token_ids)
        if (fed := np.flatnonzero(np.fromiter((s.feeds_last_sample for s in sequences), bool, count))).size:
            ids[self._to_device(first_rows[fed + 1] - 1)] = self.last_sampled[self._to_device(slots[fed])]
        sampling = np.flatnonzero(np.fromiter((s.samples for s in sequences), bool, count))
        return BuiltStep(
            sequences=sequences,
            failed=admitted.failed,
            token_ids=ids,
            positions=self._to_device(positions),
            slot_mapping=self._to_device(mapping),
            spans=Spans(new_tokens.tolist(), totals.tolist(), self._to_device(self._tables.rows[slots, :width])),
            first_rows=first_rows[:-1],
            sampling=SampleRows(
                slots[sampling],
                np.fromiter((sequences[i].position_of_sample for i in sampling), np.int64, len(sampling)),
            ),
            sample_rows=self._to_device(first_rows[sampling + 1] - 1),
            sequence_rows=self._sequence_rows(first_rows, slots) if self._has_states else None,
        )

    def _sequence_rows(self, first_rows: Ints, slots: Ints) -> SequenceRows:
        """A running sequence's state is in the row of its slot."""
        new_tokens = np.diff(first_rows)
        first, rows = (self._to_device(array.astype(np.int32)) for array in (first_rows, slots))
        return SequenceRows(first, rows, new_tokens.tolist(), bool((new_tokens == 1).all()))

    def _to_device(self, array: NDArray[np.integer[Any]]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
