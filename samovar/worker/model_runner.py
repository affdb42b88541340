"""ModelRunner: one step on a CPU: slots, forward, prompt logprobs, sampling, all done when `launch` returns."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import torch

from samovar.attention.base import AttentionPlan, Spans
from samovar.cache.state_pool import StatePool
from samovar.core.outputs import TokenLogprobs
from samovar.core.step import (
    DecodeSequences,
    PlainTokens,
    SampledTokens,
    ScheduledSequence,
    ScheduledStep,
    StepResult,
)
from samovar.hardware.memory import LOGITS_BYTES, SAMPLING_BYTES, rows_at_once
from samovar.layers.batch import ForwardBatch
from samovar.sample.logprobs import token_logprobs
from samovar.sample.pipeline import SampleRows
from samovar.sample.sampler import NOT_FINITE, SampledRows, Sampler
from samovar.sample.state import SamplingState
from samovar.worker.pending import FinishedStep
from samovar.worker.slots import Slots
from samovar.worker.step_builder import BuiltStep, StepBuilder

LogitsWatch: TypeAlias = Callable[[int, torch.Tensor], None]
"""Sees logits [rows, vocab] of a prompt whose logprobs were asked for, from a position on; they are gone afterwards. Rows
come in any pieces, and again where memory ran out."""


class LanguageModel(Protocol):
    """What the runner needs of a model."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class ModelRunner:
    """Runs steps while the caller waits. `plan` makes the attention plans of a step; `copy_blocks` copies cache blocks;
    `states` is for models with recurrent layers."""

    def __init__(
        self,
        model: LanguageModel,
        builder: StepBuilder,
        state: SamplingState,
        slots: Slots,
        *,
        plan: Callable[[Spans], tuple[AttentionPlan, ...]],
        copy_blocks: Callable[[list[tuple[int, int]]], None],
        states: StatePool | None = None,
    ) -> None:
        self._model, self._builder, self._state, self._slots = model, builder, state, slots
        self._states = states
        self._sampler = Sampler(state)
        self._plan, self._copy_blocks = plan, copy_blocks
        kind = "cuda" if builder.device.type == "cuda" else "cpu"
        self._logits_rows = rows_at_once(builder.vocab_size, LOGITS_BYTES[kind])
        self._sampling_rows = rows_at_once(builder.vocab_size, SAMPLING_BYTES[kind])
        self.watch: LogitsWatch | None = None

    @torch.inference_mode()
    def launch(self, step: ScheduledStep) -> FinishedStep:
        """Run one step. Sequences that fail alone are in `failed`; an exception means that the whole step failed."""
        began = time.perf_counter()
        refused = self._slots.change(step)
        self._state.mask(step.masks)
        self._copy_blocks(step.block_copies)
        if self._states is not None:
            begin_states(self._states, step)
        result = StepResult(step_id=step.step_id, failed=refused)
        if step.num_rounds == 1:
            self._execute(step, result)
        else:
            self._execute_rounds(step, result)
        if self._states is not None:
            self._states.copy(step.state_saves)
        result.seconds = time.perf_counter() - began
        return FinishedStep(result)

    def prepare(self) -> bool:
        """Nothing: a step is as fast the first time."""
        return False

    def synchronize(self) -> None:
        """Nothing runs here after `launch`."""

    def _execute(self, step: ScheduledStep, result: StepResult) -> None:
        """Build and compute a step; sequences that could not be started are in `result.failed` already."""
        built = self._builder.build(step)
        result.failed = {**built.failed, **result.failed}
        if built.sequences:
            self._compute(built, result)

    def _execute_rounds(self, step: ScheduledStep, result: StepResult) -> None:
        """Run a step of several rounds, each as a step of its own. Who fails in one gets nothing more."""
        columns = step.sequences
        assert isinstance(columns, DecodeSequences)
        found: dict[int, SampledTokens] = {}
        for count in range(step.num_rounds):
            part = StepResult(step.step_id)
            self._execute(ScheduledStep(step.step_id, sequences=columns.later(count) if count else columns), part)
            for row in part.sampled:
                if row.slot not in result.failed:
                    _extend(found.setdefault(row.slot, SampledTokens(row.slot, [])), row)
            result.failed = {**part.failed, **result.failed}
        result.sampled = list(found.values())

    def _compute(self, built: BuiltStep, result: StepResult) -> None:
        """Compute a step; where memory runs out, its halves one after the other, down to the one that cannot be had.

        Computing a sequence again is harmless: its K/V is written to the same places, and what was sampled is undone. Only
        a state may have moved on already, and nobody knows in which layers: with one, all of them end.
        """
        undo = self._state.last_sampled.clone()
        try:
            self._forward(built, result)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._state.last_sampled.copy_(undo)
            sequences = built.sequences
            if len(sequences) == 1 or self._states is not None:
                result.failed |= out_of_memory(sequences)
                result.sampled = [row for row in result.sampled if row.slot not in result.failed]
                return
            middle = len(sequences) // 2
        else:
            return
        for half in (sequences[:middle], sequences[middle:]):
            self._compute(self._builder.rebuild(half), result)

    def _forward(self, built: BuiltStep, result: StepResult) -> None:
        batch = ForwardBatch(
            token_ids=built.token_ids,
            positions=built.positions,
            slot_mapping=built.slot_mapping,
            plans=self._plan(built.spans),
            sequences=built.sequence_rows,
        )
        self._report_hidden(built, result, self._model(batch))

    def _report_hidden(self, built: BuiltStep, result: StepResult, hidden: torch.Tensor) -> None:
        """Prompt logprobs and samples from the hidden states of all rows."""
        for index, sequence in enumerate(built.sequences):
            if sequence.num_prompt_logprobs:
                self._add_prompt_logprobs(result, sequence, hidden[int(built.first_rows[index]) :])
        if len(built.sampling.slots):
            wanted = hidden[built.sample_rows]
            self._sample(result, built.sampling, lambda part: self._model.logits(wanted[part]))

    def _add_prompt_logprobs(self, result: StepResult, sequence: ScheduledSequence, hidden: torch.Tensor) -> None:
        """Entries for the first rows of this chunk."""
        slot, count = sequence.slot, sequence.num_prompt_logprobs
        targets, most = self._slots.prompt_targets(sequence)
        entries: list[TokenLogprobs] = []
        for first in range(0, count, self._logits_rows):
            part = slice(first, min(first + self._logits_rows, count))
            logits = self._model.logits(hidden[part])
            if not bool(logits.amax(-1).isfinite().all()):
                result.failed[slot] = NOT_FINITE
                return
            if self.watch is not None:
                self.watch(sequence.start + first, logits)
            counts = np.full(len(logits), most, np.int64)
            chosen = torch.from_numpy(targets[part]).to(logits.device)
            entries += token_logprobs(logits, chosen, counts)
        result.prompt_logprobs[slot] = entries

    def _sample(self, result: StepResult, rows: SampleRows, logits_of: Callable[[slice], torch.Tensor]) -> None:
        """Sample `rows`; `logits_of` gives some of their logits."""
        slots = rows.slots
        parts: list[SampledRows] = []
        for first in range(0, len(slots), self._logits_rows):
            logits = logits_of(slice(first, first + self._logits_rows))
            for offset in range(0, len(logits), self._sampling_rows):
                chunk = logits[offset : offset + self._sampling_rows]
                at = np.arange(first + offset, first + offset + len(chunk))
                parts.append(self._sampler.sample(chunk, rows.pick(at)))
        token_ids = torch.cat([part.token_ids for part in parts])
        self._state.append(slots, rows.positions, token_ids)
        self._report(result, slots.tolist(), token_ids.tolist(), parts)

    @staticmethod
    def _report(result: StepResult, slots: list[int], token_ids: list[int], parts: list[SampledRows]) -> None:
        """Fill `sampled`, in batch order, leaving out the rows that failed."""
        if not (result.failed or result.sampled or any(part.failed or part.logprobs for part in parts)):
            result.sampled = PlainTokens(slots, token_ids)
            return
        sampled = list(result.sampled)
        first = 0
        for part in parts:
            for row in range(len(part.token_ids)):
                slot = slots[first + row]
                if row in part.failed:
                    result.failed.setdefault(slot, part.failed[row])
                if slot in result.failed:
                    continue
                entry = part.logprobs.get(row)
                sampled.append(SampledTokens(slot, [token_ids[first + row]], None if entry is None else [entry]))
            first += len(part.token_ids)
        result.sampled = sampled


def _extend(tokens: SampledTokens, more: SampledTokens) -> None:
    """Append a round's token to those of the rounds before."""
    tokens.token_ids += more.token_ids
    if more.logprobs is not None:
        tokens.logprobs = [*(tokens.logprobs or ()), *more.logprobs]


def begin_states(states: StatePool, step: ScheduledStep) -> None:
    """The states of sequences that start: those of their snapshots, or zeros."""
    restored = {target for _, target in step.state_copies}
    states.clear(start.slot for start in step.started if start.slot not in restored)
    states.copy(step.state_copies)


def out_of_memory(sequences: Sequence[ScheduledSequence]) -> dict[int, str]:
    """slot -> what to say of sequences for which there was no memory."""
    return {s.slot: f"not enough memory to compute {s.num_new_tokens} tokens" for s in sequences}


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch's CPU allocator only says so in words."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
