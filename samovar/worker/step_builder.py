"""StepBuilder: the integers of a ScheduledStep -> the tensors of a ForwardBatch.

Block tables and the last sampled tokens live in buffers that outlast steps, one row per slot. Work per sequence is a few
list operations; work per token is NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.attention.base import Spans
from samovar.core.step import ScheduledSequence, ScheduledStep
from samovar.sample.pipeline import SampleRows

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class BuiltStep:
    """One step as tensors. `sequences` are those that run, in batch order; `failed` (slot -> message) do not.

    `token_ids`, `positions`, `slot_mapping` are int64 [num_tokens] on the device; `first_rows` [sequences] is where each
    sequence's rows begin. `sampling` are the sequences that sample, `sample_rows` their last rows.
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


class StepBuilder:
    """Persistent per-slot buffers. `last_sampled` int64 [num_slots] is on the device, written by the runner."""

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_blocks: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.block_size, self.num_blocks, self.vocab_size = block_size, num_blocks, vocab_size
        self.max_model_len = max_model_len
        self.device = torch.device(device)
        width = -(-max_model_len // block_size) + 1
        self._tables = np.zeros((num_slots, width), np.int64)
        self._num_blocks = np.zeros(num_slots, np.int64)
        self.last_sampled = torch.zeros(num_slots, dtype=torch.int64, device=self.device)

    def free(self, slot: int) -> None:
        """Empty the block table of a slot that its sequence gave up."""
        self._num_blocks[slot] = 0

    def build(self, step: ScheduledStep) -> BuiltStep:
        """The tensors of `step`, after appending its new blocks. May hold no sequence at all."""
        failed: dict[int, str] = {}
        sequences = []
        for sequence in step.sequences:
            complaint = self._append_blocks(sequence)
            if complaint is None:
                sequences.append(sequence)
            else:
                failed[sequence.slot] = complaint
        token_ids, first_rows = self._token_ids(sequences)
        if bad := self._outside_vocabulary(token_ids, first_rows):
            for index in bad:
                failed[sequences[index].slot] = f"a token id is outside the vocabulary of {self.vocab_size}"
            sequences = [sequence for index, sequence in enumerate(sequences) if index not in bad]
            token_ids, first_rows = self._token_ids(sequences)
        return self._tensors(sequences, failed, token_ids, first_rows)

    def rebuild(self, sequences: list[ScheduledSequence]) -> BuiltStep:
        """The tensors of some sequences of a step that was built before."""
        return self._tensors(sequences, {}, *self._token_ids(sequences))

    def _append_blocks(self, sequence: ScheduledSequence) -> str | None:
        """Extend a slot's table; a complaint if the result cannot hold the sequence's tokens."""
        slot, blocks = sequence.slot, sequence.new_blocks
        first = int(self._num_blocks[slot])
        end = first + len(blocks)
        if end > self._tables.shape[1]:
            return f"{end} cache blocks are more than a sequence may have ({self._tables.shape[1]})"
        if blocks:
            if min(blocks) < 0 or max(blocks) >= self.num_blocks:
                return f"a cache block is outside 0..{self.num_blocks - 1}"
            self._tables[slot, first:end] = blocks
            self._num_blocks[slot] = end
        total = sequence.start + sequence.num_new_tokens
        if total > self.max_model_len or sequence.position_of_sample > self.max_model_len:
            return f"{total} tokens are more than the context of {self.max_model_len}"
        if total > end * self.block_size:
            return f"{total} tokens do not fit into {end} cache blocks of {self.block_size}"
        return None

    @staticmethod
    def _token_ids(sequences: Sequence[ScheduledSequence]) -> tuple[Ints, Ints]:
        """All ids in a row, 0 where the device knows the token and the host does not; and where sequences begin."""
        ids = chain.from_iterable(s.token_ids if not s.feeds_last_sample else (*s.token_ids, 0) for s in sequences)
        counts = np.fromiter((s.num_new_tokens for s in sequences), np.int64, len(sequences))
        first_rows = np.concatenate((np.zeros(1, np.int64), counts.cumsum()))
        return np.fromiter(ids, np.int64, int(first_rows[-1])), first_rows

    def _outside_vocabulary(self, token_ids: Ints, first_rows: Ints) -> set[int]:
        is_bad = (token_ids < 0) | (token_ids >= self.vocab_size)
        if not is_bad.any():
            return set()
        return set((np.searchsorted(first_rows, np.flatnonzero(is_bad), side="right") - 1).tolist())

    def _tensors(
        self, sequences: list[ScheduledSequence], failed: dict[int, str], token_ids: Ints, first_rows: Ints
    ) -> BuiltStep:
        count = len(sequences)
        slots = np.fromiter((s.slot for s in sequences), np.int64, count)
        starts = np.fromiter((s.start for s in sequences), np.int64, count)
        new_tokens = np.diff(first_rows)
        totals = starts + new_tokens
        positions = np.arange(len(token_ids)) + np.repeat(starts - first_rows[:-1], new_tokens)
        blocks = self._tables[np.repeat(slots, new_tokens), positions // self.block_size]
        width = -(-int(totals.max(initial=0)) // self.block_size)
        ids = self._to_device(token_ids)
        if (fed := np.flatnonzero(np.fromiter((s.feeds_last_sample for s in sequences), bool, count))).size:
            ids[self._to_device(first_rows[fed + 1] - 1)] = self.last_sampled[self._to_device(slots[fed])]
        sampling = np.flatnonzero(np.fromiter((s.samples for s in sequences), bool, count))
        return BuiltStep(
            sequences=sequences,
            failed=failed,
            token_ids=ids,
            positions=self._to_device(positions),
            slot_mapping=self._to_device(blocks * self.block_size + positions % self.block_size),
            spans=Spans(new_tokens.tolist(), totals.tolist(), self._to_device(self._tables[slots, :width])),
            first_rows=first_rows[:-1],
            sampling=SampleRows(
                slots[sampling],
                np.fromiter((sequences[i].position_of_sample for i in sampling), np.int64, len(sampling)),
            ),
            sample_rows=self._to_device(first_rows[sampling + 1] - 1),
        )

    def _to_device(self, array: Ints) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
