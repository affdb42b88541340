"""Slots: what changes on the worker when sequences come and go, and the prompts whose logprobs are wanted."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from samovar.core.step import ScheduledSequence, ScheduledStep, SlotStart
from samovar.sample.state import SamplingState, resolve_count
from samovar.worker.block_tables import Ints


class Slots:
    """`free_blocks` empties the block table of a slot."""

    def __init__(self, state: SamplingState, free_blocks: Callable[[int], None], vocab_size: int) -> None:
        self._state, self._free_blocks, self._vocab_size = state, free_blocks, vocab_size
        self._prompts: dict[int, Ints] = {}
        self._num_alternatives: dict[int, int] = {}

    def change(self, step: ScheduledStep) -> dict[int, str]:
        """Apply `freed_slots`, then `started`; returns slots that could not be started."""
        refused: dict[int, str] = {}
        for slot in step.freed_slots:
            self._free_blocks(slot)
            self._state.free(slot)
            self._prompts.pop(slot, None)
        for start in step.started:
            self._free_blocks(start.slot)
            self._state.free(start.slot)
            try:
                self._start(start)
            except ValueError as error:
                refused[start.slot] = str(error)
        return refused

    def _start(self, start: SlotStart) -> None:
        self._state.start(start)
        self._prompts.pop(start.slot, None)
        count = resolve_count(start.params.prompt_logprobs, self._vocab_size)
        if count >= 0:
            self._prompts[start.slot] = np.array(start.token_ids[: start.num_prompt_tokens], np.int64)
            self._num_alternatives[start.slot] = count

    def prompt_targets(self, sequence: ScheduledSequence) -> tuple[Ints, int]:
        """(the prompt tokens that the chunk's first rows speak of, how many alternatives are wanted beside each).

        Row p speaks of prompt token p + 1, also across the chunk's end.
        """
        first = sequence.start + 1
        targets = self._prompts[sequence.slot][first : first + sequence.num_prompt_logprobs]
        return targets, self._num_alternatives[sequence.slot]
