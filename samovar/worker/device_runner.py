"""DeviceRunner: queues a step on a device and returns at once. Nothing in `launch` waits for the device.

Steps in which every sequence computes one token and samples run on fixed buffers, padded to one of a few sizes, and are
replayed from captured graphs. All others run as they come.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from samovar.attention.base import AttentionPlan, Spans, SpanTensors
from samovar.attention.choose import AttentionRoute
from samovar.cache.state_pool import StatePool
from samovar.core.outputs import TokenLogprobs
from samovar.core.step import PendingStep, ScheduledSequence, ScheduledStep, StepResult
from samovar.hardware.memory import LOGITS_BYTES, SAMPLING_BYTES, rows_at_once
from samovar.hardware.stream import DeviceStream
from samovar.layers.batch import ForwardBatch, sequence_rows
from samovar.sample.logprobs import LogprobTensors, measure
from samovar.sample.pipeline import SampleRows
from samovar.sample.sampler import NOT_FINITE, PendingSample, Sampler
from samovar.sample.state import SamplingState
from samovar.sample.transfer import upload
from samovar.worker.device_builder import Chunks, DecodeRows, DeviceStepBuilder, SentStep
from samovar.worker.graphs import DecodeGraphs
from samovar.worker.model_runner import LogitsWatch, begin_states, is_out_of_memory, out_of_memory
from samovar.worker.pending import Completion, FinishedStep, QueuedStep, ReadBacks, RowNews
from samovar.worker.slots import Slots
from samovar.worker.upload import aligned

TYPICAL_TOTAL = 1024
"""Tokens of a sequence for which graphs are captured ahead: first equal sequences, then from half to one and a half as
many, which attention may split otherwise."""


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """What the runner calls: the model without its head, the head, and the ops around them."""

    forward: Callable[[ForwardBatch], torch.Tensor]
    logits: Callable[[torch.Tensor], torch.Tensor]
    decode_inputs: Callable[..., None]
    """An implementation of the op of this name; so are the next two."""
    sample_tokens: Callable[..., torch.Tensor]
    copy_blocks: Callable[[list[tuple[int, int]]], None]
    last_rows: Callable[[ForwardBatch, torch.Tensor, Sequence[AttentionPlan]], torch.Tensor] | None = None
    """`LastRows`, for a model that can be cut in front of its last attention."""
    states: StatePool | None = None
    """Those of a model with recurrent layers."""


@dataclass(frozen=True, slots=True, eq=False)
class FixedInputs:
    """Where captured decode steps of one size find what is theirs: `packed` as it is uploaded, the rest made from it."""

    new_tokens: list[int]
    packed: torch.Tensor
    tensors: SpanTensors
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor


@dataclass(frozen=True, slots=True)
class Samples:
    """Tokens under way: `token_ids` int64 on the device, one for each of `slots`; negative: none, see `FAILURES`."""

    slots: list[int]
    token_ids: torch.Tensor
    pending: tuple[PendingSample, ...] = ()
    """Where the general sampler was needed, its parts, in order."""


@dataclass(slots=True)
class Parts:
    """What a step, or the parts it had to be cut into, gave so far."""

    samples: list[Samples]
    prompts: list[Callable[[StepResult], None]]
    failed: dict[int, str]


class DeviceRunner:
    """Owns what lasts from step to step on the device. One thread calls everything.

    `buckets` are the batch sizes of decode steps, ascending, the last at least the number of slots; `graphs` None runs
    everything as it comes.
    """

    def __init__(
        self,
        model: DeviceModel,
        builder: DeviceStepBuilder,
        state: SamplingState,
        route: AttentionRoute,
        stream: DeviceStream,
        *,
        slots: Slots,
        graphs: DecodeGraphs | None,
        buckets: Sequence[int],
    ) -> None:
        self._model, self._builder, self._state, self._stream = model, builder, state, stream
        self._route, self._slots, self._states, self._buckets = route, slots, model.states, list(buckets)
        self._graphs = graphs if all(backend.captures for backend in route.backends) else None
        self._sampler = Sampler(state, draw=model.sample_tokens)
        self._read_backs = ReadBacks(stream, builder.num_slots)
        kind = "cpu" if stream.device.type == "cpu" else "cuda"
        self._logits_rows = _whole_sections(rows_at_once(builder.vocab_size, LOGITS_BYTES[kind]))
        self._sampling_rows = _whole_sections(rows_at_once(builder.vocab_size, SAMPLING_BYTES[kind]))
        self.watch: LogitsWatch | None = None
        self._fixed = _fixed_inputs(builder, self._buckets, stream.device)
        sizes = sorted(self._buckets, key=lambda size: (size & (size - 1) != 0, size))
        self._to_prepare = [(size, spread) for spread in (0.0, 0.5) for size in sizes]

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> PendingStep:
        """Queue one step. Sequences that fail alone are in `failed`; an exception means that the whole step failed."""
        with self._stream.current():
            result = StepResult(step.step_id, failed=self._slots.change(step))
            back = self._read_backs.take()
            parts = Parts([], [], {})
            try:
                back.began.record()
                self._queue(step, parts)
            except BaseException:  # An interrupt, too, must not cost a buffer.
                self._read_backs.give_back(back)
                raise
            result.failed = {**parts.failed, **result.failed}
            slots = [slot for samples in parts.samples for slot in samples.slots]
            if slots:
                token_ids = [samples.token_ids for samples in parts.samples]
                joined = token_ids[0] if len(token_ids) == 1 else torch.cat(token_ids)
                self._stream.read(back.tensor[: len(slots)], joined)
            back.ended.record()
            if not step.sequences:
                self._read_backs.give_back(back)
                return FinishedStep(result)
            return QueuedStep(result, slots, _completions(parts), back, self._read_backs)

    def _queue(self, step: ScheduledStep, parts: Parts) -> None:
        """Queue all of a step but the copy of its tokens to the host."""
        self._state.flush()
        self._state.mask(step.masks)
        if step.block_copies:
            self._model.copy_blocks(step.block_copies)
        if self._states is not None:
            begin_states(self._states, step)
        if not self._decode(step.sequences, parts):
            chunks = self._builder.chunks(step.sequences)
            parts.failed.update(chunks.failed)
            if chunks.sequences:
                self._compute(chunks, parts)
        if self._states is not None:
            self._states.copy(step.state_saves)

    @torch.inference_mode()
    def prepare(self) -> bool:
        """Capture the next kind of decode step ahead of its use; False once there is nothing left to capture."""
        graphs = self._graphs
        while graphs is not None and not graphs.is_full and self._to_prepare:
            bucket, spread = self._to_prepare.pop(0)
            totals = (np.linspace(1 + spread, 1 - spread, bucket) * TYPICAL_TOTAL).astype(int).tolist()
            key, work = self._decode_work(totals, bucket, is_plain=True)
            if graphs.knows(key):
                continue
            with self._stream.current():
                self._builder.send_padding(bucket)
                try:
                    work()
                except (MemoryError, RuntimeError) as error:
                    if not is_out_of_memory(error):
                        raise
                    graphs.refuse(key, error)
                else:
                    graphs.capture(key, work)
            return True
        return False

    def synchronize(self) -> None:
        """Wait until everything queued so far has run."""
        mark = self._stream.mark()
        mark.record()
        mark.wait()

    # Decode steps, on fixed buffers.

    def _decode(self, sequences: Sequence[ScheduledSequence], parts: Parts) -> bool:
        """Queue a decode step; False if this is another kind of step."""
        graphs = self._graphs
        if graphs is None or not sequences:
            return False
        rows = self._builder.decode_rows(sequences)
        if rows is None:
            return False
        count = len(rows.slots)
        bucket = self._buckets[bisect_left(self._buckets, count)]
        is_plain = self._state.is_plain(rows.slot_array)
        key, work = self._decode_work(rows.totals + [0] * (bucket - count), bucket, is_plain=is_plain)
        is_known = graphs.knows(key)
        # A replay asks for no memory, but what is not in a graph does: the first run of a kind, and the general sampler.
        undo = None if is_known and is_plain else self._state.last_sampled.clone()
        try:
            self._builder.send_decode(rows, bucket)
            output = graphs.run(key, work)
            if output is not None:
                parts.samples.append(self._decoded(rows, bucket, output, is_plain=is_plain))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if not is_known:
                graphs.refuse(key, error)
            if undo is not None:
                self._state.last_sampled.copy_(undo)
            if self._states is not None:  # See `_compute`.
                parts.failed |= out_of_memory(sequences)
                return True
            output = None
        if output is None:
            self._compute(self._builder.again(list(sequences)), parts)
        return True

    def _decode_work(
        self, totals: list[int], bucket: int, *, is_plain: bool
    ) -> tuple[tuple[object, ...], Callable[[], torch.Tensor]]:
        """(what a captured step of this size and these lengths can be shared by, what it consists of)."""
        builder, fixed = self._builder, self._fixed[bucket]
        spans = Spans(fixed.new_tokens, totals, builder.tables, fixed.tensors)
        shapes = tuple([backend.launch_shape(spans) for backend in self._route.backends])

        def work() -> torch.Tensor:
            self._model.decode_inputs(
                fixed.packed,
                self._state.last_sampled,
                builder.tables,
                builder.block_size,
                fixed.token_ids,
                fixed.positions,
                fixed.slot_mapping,
                fixed.tensors.totals,
            )
            plans = self._route.plan(spans)
            rows = sequence_rows(spans)
            hidden = self._model.forward(
                ForwardBatch(fixed.token_ids, fixed.positions, fixed.slot_mapping, plans, sequences=rows)
            )
            return self._draw(hidden, fixed.packed[0], fixed.packed[3]) if is_plain else hidden

        return (bucket, shapes, is_plain), work

    def _decoded(self, rows: DecodeRows, bucket: int, output: torch.Tensor, *, is_plain: bool) -> Samples:
        count = len(rows.slots)
        if is_plain:
            return Samples(rows.slots, output[:count])
        sampling = SampleRows(rows.slot_array, rows.total_array)
        return self._sample(output[:count], sampling)

    # Steps of any kind.

    def _compute(self, chunks: Chunks, parts: Parts) -> None:
        """Compute a step; where memory runs out, its halves one after the other, down to the one that cannot be had.

        Computing a sequence again is harmless: its K/V is written to the same places, and what was sampled is undone. Only
        a state may have moved on already, and nobody knows in which layers: with one, all of them end.
        """
        undo = self._state.last_sampled.clone()
        try:
            self._forward(chunks, parts)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._state.last_sampled.copy_(undo)
            sequences = chunks.sequences
            if len(sequences) == 1 or self._states is not None:
                parts.failed |= out_of_memory(sequences)
                return
            middle = len(sequences) // 2
        else:
            return
        for half in (sequences[:middle], sequences[middle:]):
            self._compute(self._builder.again(half), parts)

    def _forward(self, chunks: Chunks, parts: Parts) -> None:
        """Queue the whole step; `parts` is changed at the end, when nothing can fail any more."""
        sent = self._builder.send(chunks, self._buckets)
        hidden, sampled = self._hidden(sent, all_rows=any(s.num_prompt_logprobs for s in chunks.sequences))
        prompts = [
            self._prompt_logprobs(sequence, hidden[int(first) :])
            for sequence, first in zip(chunks.sequences, chunks.first_rows[:-1], strict=True)
            if sequence.num_prompt_logprobs
        ]
        if len(sent.sampling.slots):
            parts.samples.append(self._sample_sent(sent, sampled))
        parts.prompts += prompts

    def _hidden(self, sent: SentStep, *, all_rows: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of all rows, unless only those that sample are needed, and of these, in order and padded."""
        rows = sequence_rows(sent.spans)
        plans = self._route.plan(sent.spans)
        batch = ForwardBatch(sent.token_ids, sent.positions, sent.slot_mapping, plans, sequences=rows)
        last_rows, count = self._model.last_rows, len(sent.sampling.slots)
        if last_rows is None or all_rows or count == len(sent.token_ids):
            hidden = self._model.forward(batch)
            return hidden, hidden[sent.sample_rows]
        plans = self._route.plan(self._builder.sampling_spans(sent)) if count else ()
        sampled = last_rows(batch, sent.sample_rows, plans)
        return sampled, sampled

    def _sample_sent(self, sent: SentStep, sampled: torch.Tensor) -> Samples:
        rows = sent.sampling
        count = len(rows.slots)
        if self._state.is_plain(rows.slots):
            drawn = self._draw(sampled, sent.sample_slots, sent.sample_positions)
            return Samples(rows.slots.tolist(), drawn[:count])
        return self._sample(sampled[:count], rows)

    def _draw(self, hidden: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Tokens of rows that ask for nothing but a draw, int64 [rows]; as many logits at once as are planned for."""
        settings, last, step = self._state.settings, self._state.last_sampled, self._logits_rows
        drawn = [
            self._model.sample_tokens(
                self._model.logits(hidden[i : i + step]), settings, slots[i : i + step], positions[i : i + step], last
            )
            for i in range(0, len(hidden), step)
        ]
        return drawn[0] if len(drawn) == 1 else torch.cat(drawn)

    def _sample(self, hidden: torch.Tensor, rows: SampleRows) -> Samples:
        """Tokens of rows with penalties, rules or logprobs among them."""
        pending: list[PendingSample] = []
        for first in range(0, len(rows.slots), self._logits_rows):
            logits = self._model.logits(hidden[first : first + self._logits_rows])
            for offset in range(0, len(logits), self._sampling_rows):
                chunk = logits[offset : offset + self._sampling_rows]
                at = np.arange(first + offset, first + offset + len(chunk))
                pending.append(self._sampler.launch(chunk, rows.pick(at)))
        token_ids = torch.cat([part.token_ids for part in pending])
        self._state.append(rows.slots, rows.positions, token_ids)
        return Samples(rows.slots.tolist(), token_ids, tuple(pending))

    def _prompt_logprobs(self, sequence: ScheduledSequence, hidden: torch.Tensor) -> Callable[[StepResult], None]:
        """Queue the entries of the first rows of a chunk; the function that is returned reads them."""
        targets, most = self._slots.prompt_targets(sequence)
        tensors: list[LogprobTensors] = []
        # Log-probabilities take as many copies of their logits as the general sampler: its share of rows at once.
        for first in range(0, len(targets), self._sampling_rows):
            part = targets[first : first + self._sampling_rows]
            logits = self._model.logits(hidden[first : first + len(part)])
            if self.watch is not None:
                self.watch(sequence.start + first, logits)
            tensors.append(measure(logits, upload(part, self._stream.device), most).download())

        def read(result: StepResult) -> None:
            if not all(bool(one.is_finite.all()) for one in tensors):
                result.failed[sequence.slot] = NOT_FINITE
                return
            entries: list[TokenLogprobs] = []
            for one in tensors:
                entries += one.entries(np.full(len(one.chosen), most, np.int64))
            result.prompt_logprobs[sequence.slot] = entries

        return read


def _fixed_inputs(builder: DeviceStepBuilder, buckets: Sequence[int], device: torch.device) -> dict[int, FixedInputs]:
    """For each size the beginnings of buffers made for the largest: 28 bytes a row of it."""
    largest = buckets[-1]
    token_ids, positions, slot_mapping = (torch.zeros(largest, dtype=torch.int64, device=device) for _ in range(3))
    totals = torch.zeros(largest, dtype=torch.int32, device=device)
    first_rows = torch.arange(largest + 1, dtype=torch.int32, device=device)
    fixed = {}
    for size in buckets:
        packed = builder.packed(size)
        tensors = SpanTensors(first_rows[: size + 1], totals[:size], packed[0], builder.tables)
        fixed[size] = FixedInputs([1] * size, packed, tensors, token_ids[:size], positions[:size], slot_mapping[:size])
    return fixed


def _completions(parts: Parts) -> list[Completion]:
    """What is to be read once the step is over, besides the tokens."""

    def read_prompts(result: StepResult, news: RowNews) -> None:
        for read in parts.prompts:
            read(result)

    def read_samples(result: StepResult, news: RowNews) -> None:
        row = 0
        for samples in parts.samples:
            for part in samples.pending:
                found = part.collect()
                news.failed.update({row + at: message for at, message in found.failed.items()})
                news.logprobs.update({row + at: entry for at, entry in found.logprobs.items()})
                row += len(part.token_ids)
            if not samples.pending:
                row += len(samples.slots)

    completions: list[Completion] = []
    if parts.prompts:
        completions.append(read_prompts)
    if any(samples.pending for samples in parts.samples):
        completions.append(read_samples)
    return completions


def _whole_sections(rows: int) -> int:
    """`rows`, rounded down so that parts of aligned tensors are aligned."""
    return rows if rows < aligned(1) else rows // aligned(1) * aligned(1)
