"""ModelRunner: one step on one rank: slots, forward, prompt logprobs, sampling, and the tokens back to the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from samovar.attention.base import AttentionPlan, Spans
from samovar.core.outputs import TokenLogprobs
from samovar.core.step import SampledTokens, ScheduledSequence, ScheduledStep, SlotStart, StepResult
from samovar.hardware.memory import LOGITS_BYTES, SAMPLING_BYTES, rows_at_once
from samovar.layers.batch import ForwardBatch
from samovar.sample.logprobs import token_logprobs
from samovar.sample.sampler import NOT_FINITE, SampledRows, Sampler
from samovar.sample.state import SamplingState, resolve_count
from samovar.worker.step_builder import BuiltStep, StepBuilder


class LanguageModel(Protocol):
    """What the runner needs of a model."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor: ...

    def logits(self, hidden: torch.Tensor) -> torch.Tensor: ...


class ModelRunner:
    """Owns what lasts from step to step on the device: block tables, sampling state, last sampled tokens.

    `plan` makes the attention plans of a step; `copy_blocks` copies cache blocks.
    """

    def __init__(
        self,
        model: LanguageModel,
        builder: StepBuilder,
        state: SamplingState,
        *,
        plan: Callable[[Spans], tuple[AttentionPlan, ...]],
        copy_blocks: Callable[[list[tuple[int, int]]], None],
    ) -> None:
        self._model, self._builder, self._state = model, builder, state
        self._sampler = Sampler(state)
        self._plan, self._copy_blocks = plan, copy_blocks
        self._prompts: dict[int, np.ndarray[tuple[int], np.dtype[np.int64]]] = {}
        self._num_prompt_logprobs: dict[int, int] = {}
        kind = "cuda" if builder.device.type == "cuda" else "cpu"
        self._logits_rows = rows_at_once(builder.vocab_size, LOGITS_BYTES[kind])
        self._sampling_rows = rows_at_once(builder.vocab_size, SAMPLING_BYTES[kind])

    @torch.inference_mode()
    def run(self, step: ScheduledStep) -> StepResult:
        """Run one step. Sequences that fail alone are in `failed`; an exception means that the whole step failed."""
        refused = self._change_slots(step)
        self._copy_blocks(step.block_copies)
        built = self._builder.build(step)
        result = StepResult(step_id=step.step_id, failed={**built.failed, **refused})
        if not built.sequences:
            return result
        self._compute(built, result)
        return result

    def _compute(self, built: BuiltStep, result: StepResult) -> None:
        """Compute a step; where memory runs out, its halves one after the other, down to the one that cannot be had.

        Computing a sequence again is harmless: its K/V is written to the same places, and nothing else has changed yet.
        """
        try:
            self._forward(built, result)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            sequences = built.sequences
            if len(sequences) == 1:
                result.failed[sequences[0].slot] = f"not enough memory to compute {sequences[0].num_new_tokens} tokens"
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
        )
        hidden = self._model(batch)
        for index, sequence in enumerate(built.sequences):
            if sequence.num_prompt_logprobs:
                self._add_prompt_logprobs(result, sequence, hidden[int(built.first_rows[index]) :])
        if len(built.sampling.slots):
            self._sample(result, built, hidden[built.sample_rows])

    def _change_slots(self, step: ScheduledStep) -> dict[int, str]:
        """Apply `freed_slots`, then `started`; returns slots that could not be started."""
        refused: dict[int, str] = {}
        for slot in step.freed_slots:
            self._builder.free(slot)
            self._state.free(slot)
            self._prompts.pop(slot, None)
        for start in step.started:
            self._builder.free(start.slot)
            self._state.free(start.slot)
            try:
                self._start(start)
            except ValueError as error:
                refused[start.slot] = str(error)
        return refused

    def _start(self, start: SlotStart) -> None:
        self._state.start(start)
        self._prompts.pop(start.slot, None)
        count = resolve_count(start.params.prompt_logprobs, self._builder.vocab_size)
        if count >= 0:
            self._prompts[start.slot] = np.array(start.token_ids[: start.num_prompt_tokens], np.int64)
            self._num_prompt_logprobs[start.slot] = count

    def _add_prompt_logprobs(self, result: StepResult, sequence: ScheduledSequence, hidden: torch.Tensor) -> None:
        """Entries for the first rows of this chunk: row p speaks of prompt token p + 1, also across the chunk's end."""
        slot, count = sequence.slot, sequence.num_prompt_logprobs
        targets = self._prompts[slot][sequence.start + 1 : sequence.start + 1 + count]
        entries: list[TokenLogprobs] = []
        for first in range(0, count, self._logits_rows):
            part = slice(first, min(first + self._logits_rows, count))
            logits = self._model.logits(hidden[part])
            if not bool(logits.amax(-1).isfinite().all()):
                result.failed[slot] = NOT_FINITE
                return
            counts = np.full(len(logits), self._num_prompt_logprobs[slot], np.int64)
            chosen = torch.from_numpy(targets[part]).to(logits.device)
            entries += token_logprobs(logits, chosen, counts)
        result.prompt_logprobs[slot] = entries

    def _sample(self, result: StepResult, built: BuiltStep, hidden: torch.Tensor) -> None:
        rows, slots = built.sampling, built.sampling.slots
        parts: list[SampledRows] = []
        for first in range(0, len(slots), self._logits_rows):
            logits = self._model.logits(hidden[first : first + self._logits_rows])
            for offset in range(0, len(logits), self._sampling_rows):
                chunk = logits[offset : offset + self._sampling_rows]
                at = np.arange(first + offset, first + offset + len(chunk))
                parts.append(self._sampler.sample(chunk, rows.pick(at)))
        token_ids = torch.cat([part.token_ids for part in parts])
        self._builder.last_sampled[torch.from_numpy(slots).to(token_ids.device)] = token_ids
        self._state.append(slots, rows.positions, token_ids)
        self._report(result, slots.tolist(), token_ids.tolist(), parts)

    @staticmethod
    def _report(result: StepResult, slots: list[int], token_ids: list[int], parts: list[SampledRows]) -> None:
        """Fill `sampled`, in batch order, leaving out the rows that failed."""
        first = 0
        for part in parts:
            for row in range(len(part.token_ids)):
                slot = slots[first + row]
                if row in part.failed:
                    result.failed.setdefault(slot, part.failed[row])
                if slot in result.failed:
                    continue
                entry = part.logprobs.get(row)
                result.sampled.append(SampledTokens(slot, [token_ids[first + row]], None if entry is None else [entry]))
            first += len(part.token_ids)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed; torch's CPU allocator only says so in words."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error)
