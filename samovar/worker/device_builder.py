"""DeviceStepBuilder: the integers of a ScheduledStep -> device tensors, through one upload and without waiting.

Block tables exist twice: on the host, where every step is checked, and on the device, where kernels look blocks up. Steps
in which each sequence computes one token and samples send four integers a row; all others send what the host derives.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.attention.base import Spans, SpanTensors
from samovar.core.step import FED, DecodeSequences, ScheduledSequence
from samovar.hardware.stream import DeviceStream
from samovar.sample.pipeline import SampleRows
from samovar.worker.block_tables import BlockTables, Ints, admit, token_ids_of
from samovar.worker.upload import Upload, aligned

PACKED_ROWS = 4
"""Rows of `packed`: slot, position (-1: padding), token id (-1: the slot's last sample), index the sample will have."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """A step of one token a row, the longest sequences first. `slots` and `totals` (tokens so far, this one included) are
    per row, as is `packed`.

    Attention gives each sequence to programs of its own, in the order of rows: those that start last should be short, or
    most of the device waits for the last one.
    """

    slots: list[int]
    slot_array: Ints
    totals: list[int]
    total_array: Ints
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Chunks:
    """Any step, checked, on the host. `first_rows` [sequences + 1]: where each sequence's rows begin."""

    sequences: list[ScheduledSequence]
    failed: dict[int, str]
    token_ids: Ints
    first_rows: Ints


@dataclass(frozen=True, slots=True, eq=False)
class SentStep:
    """A step on the device. `token_ids`, `positions`, `slot_mapping` int64 [tokens].

    `sampling` are the rows that sample as the host knows them, `sample_rows` int64 [samples] where their hidden states
    are, `sample_slots` and `sample_positions` int32 [samples] the same as `sampling`.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    spans: Spans
    sampling: SampleRows
    sample_rows: torch.Tensor
    sample_slots: torch.Tensor
    sample_positions: torch.Tensor


class DeviceStepBuilder:
    """Block tables of every slot on the device: `tables` int32 [num_slots + 1, width]; the last row is for padding.

    Device memory: that, and the upload's staging.
    """

    def __init__(
        self,
        stream: DeviceStream,
        tables: BlockTables,
        last_sampled: torch.Tensor,
        *,
        max_tokens: int,
        vocab_size: int,
        gathers: bool,
    ) -> None:
        """`last_sampled` int64 [num_slots + 1]; `max_tokens` of one step; `gathers`: `Spans.block_tables` is wanted."""
        num_slots = len(tables.rows)
        if tables.num_blocks * tables.block_size >= 1 << 31 or (num_slots + 1) * tables.width >= 1 << 31:
            raise ValueError(
                f"{tables.num_blocks} blocks of {tables.block_size} tokens are too many for 32-bit indices"
            )
        self.vocab_size, self.num_slots, self.block_size = vocab_size, num_slots, tables.block_size
        self._host, self._gathers = tables, gathers
        device = stream.device
        self.tables = torch.zeros((num_slots + 1, tables.width), dtype=torch.int32, device=device)
        self.last_sampled = last_sampled
        self._first_rows = torch.arange(num_slots + 1, dtype=torch.int32, device=device)
        self._max_new_blocks = max(2 * (max_tokens // tables.block_size + num_slots), 4096)
        sections = 3 * aligned(max_tokens) + 8 * aligned(num_slots + 1) + 2 * aligned(self._max_new_blocks)
        self._upload = Upload(stream, max(sections, PACKED_ROWS * aligned(num_slots) + 2 * self._max_new_blocks))
        self._new_blocks: list[tuple[int, int, list[int]]] = []
        # Those of the latest decode step as they came, and by length: most steps have the ones of the step before.
        self._slots: list[int] = []
        self._order = self._slot_array = np.zeros(0, np.int64)
        self._ordered_slots: list[int] = []

    @property
    def staging(self) -> torch.Tensor:
        """What was sent last, int32."""
        return self._upload.staging

    def packed(self, rows: int) -> torch.Tensor:
        """The place of a decode step's rows in `staging`: int32 [PACKED_ROWS, rows], each row aligned."""
        stride = aligned(rows)
        return self.staging[: PACKED_ROWS * stride].view(PACKED_ROWS, stride)[:, :rows]

    def free(self, slot: int) -> None:
        """Empty the block table of a slot that its sequence gave up."""
        self._host.free(slot)
        if self._new_blocks:
            self._new_blocks = [piece for piece in self._new_blocks if piece[0] != slot]

    def decode_rows(self, sequences: Sequence[ScheduledSequence]) -> DecodeRows | None:
        """Check a step of one token a row; None if it is another kind of step, or if a row must be refused.

        Changes nothing then. Otherwise the new blocks are noted, to be sent with the rows.
        """
        columns = sequences if isinstance(sequences, DecodeSequences) else self._columns(sequences)
        if columns is None or min(columns.token_ids) < FED or max(columns.token_ids) >= self.vocab_size:
            return None
        slots, token_ids, totals = columns.slots, columns.token_ids, np.array(columns.totals)
        if slots != self._slots:
            # All grow by one token a step, so that the order holds until one comes or goes.
            self._slots, self._order = slots, np.argsort(-totals, kind="stable")
            self._slot_array = np.array(slots)[self._order]
            self._ordered_slots = self._slot_array.tolist()
        total_array = totals[self._order]
        if token_ids.count(FED) != len(token_ids):
            token_ids = [token_ids[row] for row in self._order.tolist()]
        growing = [(slots[row], blocks) for row, blocks in columns.new_blocks.items()]
        before = [int(self._host.counts[slot]) for slot, _ in growing]
        refused = [slot for slot, blocks in growing if self._host.extend(slot, blocks) is not None]
        if refused or not self._host.holds(self._slot_array, total_array):
            for (slot, _), first in zip(growing, before, strict=True):
                self._host.counts[slot] = first
            return None
        self._new_blocks += [(slot, first, blocks) for (slot, blocks), first in zip(growing, before, strict=True)]
        return DecodeRows(self._ordered_slots, self._slot_array, total_array.tolist(), total_array, token_ids)

    def _columns(self, sequences: Sequence[ScheduledSequence]) -> DecodeSequences | None:
        """Rows that were made one by one, as columns."""
        if not all(s.num_new_tokens == 1 and s.samples and not s.num_prompt_logprobs for s in sequences):
            return None
        # A negative id would be taken for one that the device knows: this one is refused.
        ids = [
            FED if not s.token_ids else s.token_ids[0] if s.token_ids[0] >= 0 else self.vocab_size for s in sequences
        ]
        blocks = {row: s.new_blocks for row, s in enumerate(sequences) if s.new_blocks}
        return DecodeSequences([s.slot for s in sequences], [s.position_of_sample for s in sequences], ids, blocks)

    def chunks(self, sequences: Sequence[ScheduledSequence]) -> Chunks:
        """Check any step; rows that must be refused are in `failed`."""
        before = {s.slot: int(self._host.counts[s.slot]) for s in sequences if s.new_blocks}
        admitted = admit(self._host, sequences, self.vocab_size)
        self._new_blocks += [
            (s.slot, before[s.slot], s.new_blocks)
            for s in sequences
            if s.new_blocks and self._host.counts[s.slot] > before[s.slot]
        ]
        return Chunks(admitted.sequences, admitted.failed, admitted.token_ids, admitted.first_rows)

    def again(self, sequences: list[ScheduledSequence]) -> Chunks:
        """Some sequences of a step that was checked before."""
        return Chunks(sequences, {}, *token_ids_of(sequences))

    def send_decode(self, rows: DecodeRows, padded: int) -> None:
        """Queue the upload of `rows`, padded to `padded` rows, into `packed(padded)`; and that of new blocks."""
        count, stride = len(rows.slots), aligned(padded)
        end = PACKED_ROWS * stride
        array = self._begin(end)
        packed = array[:end].reshape(PACKED_ROWS, stride)
        packed[0, :count], packed[0, count:] = rows.slot_array, self.num_slots
        packed[3, :count], packed[3, count:] = rows.total_array, 0
        np.subtract(packed[3], 1, out=packed[1])
        packed[2, :count] = FED if rows.token_ids.count(FED) == count else rows.token_ids
        packed[2, count:] = 0
        self._send_with_new_blocks(array, end)

    def send_padding(self, padded: int) -> None:
        """Queue the upload of `padded` rows that are all padding."""
        none = np.zeros(0, np.int64)
        self.send_decode(DecodeRows([], none, [], none, []), padded)

    def send(self, chunks: Chunks, sizes: Sequence[int]) -> SentStep:
        """Queue the upload of any step; its rows that sample are padded to the next of `sizes`, which are ascending."""
        sequences, first_rows, token_ids = chunks.sequences, chunks.first_rows, chunks.token_ids
        count = len(sequences)
        slots = np.fromiter((s.slot for s in sequences), np.int64, count)
        starts = np.fromiter((s.start for s in sequences), np.int64, count)
        new_tokens = np.diff(first_rows)
        totals = starts + new_tokens
        positions = np.arange(len(token_ids)) + np.repeat(starts - first_rows[:-1], new_tokens)
        mapping = self._host.slot_mapping(np.repeat(slots, new_tokens), positions)
        fed = np.flatnonzero([s.feeds_last_sample for s in sequences])
        samples = np.flatnonzero([s.samples for s in sequences])
        sampling = SampleRows(slots[samples], np.array([sequences[i].position_of_sample for i in samples], np.int64))
        padding = sizes[bisect_left(sizes, len(samples))] - len(samples) if len(samples) else 0
        parts = (
            token_ids, positions, mapping, first_rows, totals, slots, first_rows[fed + 1] - 1, slots[fed],
            _padded(first_rows[samples + 1] - 1, padding, 0), _padded(sampling.slots, padding, self.num_slots),
            _padded(sampling.positions, padding, 0),
        )  # fmt: skip
        array, views, end = self._begin(sum(aligned(len(part)) for part in parts)), [], 0
        for part in parts:
            array[end : end + len(part)] = part
            views.append(slice(end, end + len(part)))
            end += aligned(len(part))
        self._send_with_new_blocks(array, end)
        narrow = [self.staging[view] for view in views]
        everything = self.staging[:end].long()
        wide = [everything[view] for view in views]
        if len(fed):
            wide[0].index_copy_(0, wide[6], self.last_sampled[wide[7]])
        tensors = SpanTensors(narrow[3], narrow[4], narrow[5], self.tables)
        return SentStep(
            token_ids=wide[0],
            positions=wide[1],
            slot_mapping=wide[2],
            spans=Spans(new_tokens.tolist(), totals.tolist(), self._block_tables(wide[5], totals), tensors),
            sampling=sampling,
            sample_rows=wide[8],
            sample_slots=narrow[9],
            sample_positions=narrow[10],
        )

    def sampling_spans(self, sent: SentStep) -> Spans:
        """The sequences of `sent` that sample, as if only their last token were new, and padding. Uploads nothing."""
        totals, count = sent.sampling.positions, len(sent.sample_slots)
        tensors = SpanTensors(self._first_rows[: count + 1], sent.sample_positions, sent.sample_slots, self.tables)
        padded = totals.tolist() + [0] * (count - len(totals))
        return Spans([1] * count, padded, self._block_tables(sent.sample_slots, totals), tensors)

    def _block_tables(self, slots: torch.Tensor, totals: Ints) -> torch.Tensor:
        if not self._gathers:
            return self.tables
        return self.tables[slots, : -(-int(totals.max(initial=0)) // self.block_size)]

    def _begin(self, size: int) -> NDArray[np.int32]:
        """Host memory for a step of `size` integers and its new blocks; those that do not fit go ahead of it."""
        most = self._max_new_blocks
        while sum(len(blocks) for _, _, blocks in self._new_blocks) > most:
            slot, first, blocks = self._new_blocks[-1]
            for at in range(0, len(blocks), most):
                self._send(self._upload.begin(2 * most), 0, [(slot, first + at, blocks[at : at + most])])
            self._new_blocks.pop()
        return self._upload.begin(size + 2 * aligned(sum(len(blocks) for _, _, blocks in self._new_blocks)))

    def _send(self, array: NDArray[np.int32], end: int, pieces: list[tuple[int, int, list[int]]]) -> None:
        """Send what was filled in up to `end`, and new blocks behind it; then write those into `tables`."""
        if not pieces:
            self._upload.send(end)
            return
        starts = [(slot * self._host.width + first, blocks) for slot, first, blocks in pieces]
        targets = [at + i for at, blocks in starts for i in range(len(blocks))]
        count, middle = len(targets), end + aligned(len(targets))
        array[end : end + count] = targets
        array[middle : middle + count] = [block for _, blocks in starts for block in blocks]
        self._upload.send(middle + count)
        index = self.staging[end : end + count].long()
        self.tables.view(-1).index_copy_(0, index, self.staging[middle : middle + count])

    def _send_with_new_blocks(self, array: NDArray[np.int32], end: int) -> None:
        """`_send` with all that were noted. Where memory runs out they stay noted: the step is computed in parts then."""
        self._send(array, end, self._new_blocks)
        self._new_blocks = []


def _padded(values: Ints, padding: int, value: int) -> Ints:
    """`values` and `padding` times `value`."""
    return np.concatenate((values, np.full(padding, value))) if padding else values
