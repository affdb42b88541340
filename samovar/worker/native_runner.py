"""NativeRunner: a ModelRunner whose step is one call of the CPU library, sampling of plain greedy rows included."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.core.step import DecodeSequences, PlainTokens, SampledTokens, ScheduledStep, StepResult
from samovar.kernels.sample_tokens import NOT_FINITE as NOT_FINITE_ID
from samovar.sample.pipeline import SampleRows
from samovar.sample.sampler import FAILURES, SampledRows
from samovar.sample.state import SamplingState
from samovar.worker.block_tables import BlockTables
from samovar.worker.model_runner import LanguageModel, ModelRunner, is_out_of_memory
from samovar.worker.native_model import NativeModel, Rows
from samovar.worker.slots import Slots
from samovar.worker.step_builder import BuiltStep, StepBuilder


class NativeRunner(ModelRunner):
    """Runs steps of `native`, which was made of `model`. `tables` are those of the builder."""

    def __init__(
        self,
        model: LanguageModel,
        native: NativeModel,
        tables: BlockTables,
        state: SamplingState,
        slots: Slots,
        *,
        copy_blocks: Callable[[list[tuple[int, int]]], None],
    ) -> None:
        builder = StepBuilder(tables, state.last_sampled, vocab_size=native.vocab_size)
        super().__init__(model, builder, state, slots, plan=lambda spans: (), copy_blocks=copy_blocks)
        self._native, self._tables = native, tables
        self._last_sampled: NDArray[np.int64] = state.last_sampled.numpy()

    def close(self) -> None:
        """Let go of the programs; no step may come any more."""
        self._native.close()

    def _execute(self, step: ScheduledStep, result: StepResult) -> None:
        sequences, native = step.sequences, self._native
        rows = None
        if 0 < len(sequences) <= native.logits_rows:
            rows = native.inputs.load_decode(sequences, self._tables, self._last_sampled, native.vocab_size)
        if rows is None:
            super()._execute(step, result)
            return
        undo = self._last_sampled[rows.slots]
        try:
            self._sample_rows(result, rows, "every")
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            self._last_sampled[rows.slots] = undo
            self._compute(self._builder.rebuild(list(sequences)), result)

    def _execute_rounds(self, step: ScheduledStep, result: StepResult) -> None:
        sequences, native, rows = step.sequences, self._native, None
        assert isinstance(sequences, DecodeSequences)
        inputs, count, num_rounds = native.inputs, len(sequences), step.num_rounds
        if count <= native.logits_rows and self._state.is_greedy(np.array(sequences.slots)):
            rows = inputs.load_decode(sequences, self._tables, self._last_sampled, native.vocab_size, num_rounds)
        if rows is None:
            super()._execute_rounds(step, result)
            return
        # Between two rounds nothing is done but what the next one needs.
        rounds = [native.most_likely("every").tolist()]
        for _ in range(1, num_rounds):
            inputs.advance()
            rounds.append(native.most_likely("every").tolist())
        self._last_sampled[rows.slots] = inputs.argmax_ids[:count].clip(0)
        sampled = []
        for slot, *token_ids in zip(sequences.slots, *rounds, strict=True):
            if min(token_ids) < 0:
                result.failed[slot] = FAILURES[NOT_FINITE_ID]
                del token_ids[next(at for at, token in enumerate(token_ids) if token < 0) :]
            sampled.append(SampledTokens(slot, token_ids))
        result.sampled = sampled

    def _forward(self, built: BuiltStep, result: StepResult) -> None:
        native, count = self._native, len(built.sampling.slots)
        native.inputs.load(built)
        if any(sequence.num_prompt_logprobs for sequence in built.sequences):
            self._report_hidden(built, result, native.hidden("every"))
        elif 0 < count <= native.logits_rows:
            self._sample_rows(result, built.sampling, "last")
        else:
            hidden = native.hidden("last")
            if count:
                self._sample(result, built.sampling, lambda part: self._model.logits(hidden[part]))

    def _sample_rows(self, result: StepResult, sampling: SampleRows, rows: Rows) -> None:
        """Run the step that was loaded, and sample the rows that come out."""
        if self._state.is_greedy(sampling.slots):
            self._take(result, sampling, self._native.most_likely(rows))
        else:
            logits = self._native.logits(rows)
            self._sample(result, sampling, lambda part: logits[part])

    def _take(self, result: StepResult, sampling: SampleRows, token_ids: NDArray[np.int64]) -> None:
        """Book the most likely tokens."""
        slots = sampling.slots.tolist()
        if result.failed or result.sampled or token_ids.min() < 0:
            failed = {int(row): FAILURES[NOT_FINITE_ID] for row in np.flatnonzero(token_ids < 0)}
            token_ids = token_ids.clip(0)
            part = SampledRows(torch.from_numpy(token_ids), failed=failed)
            self._report(result, slots, token_ids.tolist(), [part])
        else:
            result.sampled = PlainTokens(slots, token_ids.tolist())
        self._last_sampled[sampling.slots] = token_ids
