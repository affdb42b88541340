"""Draft: a step in the making, and the record of it until its result is booked."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from samovar.core.outputs import TokenLogprobs
from samovar.core.step import DecodeSequences, ScheduledSequence, SlotStart
from samovar.schedule.admission import StepBudget
from samovar.schedule.live import LiveSequence
from samovar.schedule.snapshots import PlannedSave

# Most rows bring no blocks: one shared empty list spares an allocation each. Nobody changes it.
NO_IDS: list[int] = []


@dataclass(slots=True)
class Draft:
    """Rows of a step, whose they are, and what is left of its budget."""

    budget: StepBudget
    rows: list[ScheduledSequence] | DecodeSequences = field(default_factory=list)
    sequences: list[LiveSequence] = field(default_factory=list)
    """Whose row it is, aligned with `rows`."""
    stays: list[int] = field(default_factory=list)
    """Each sequence's `stay` when the row was made."""
    started: list[SlotStart] = field(default_factory=list)
    state_copies: list[tuple[int, int]] = field(default_factory=list)
    """Rows of recurrent states, as (source, target), to copy before the step."""
    saves: list[PlannedSave] = field(default_factory=list)
    """Those to copy after it."""
    num_rounds: int = 1
    """Tokens in a row that each row computes; more than 1 only if nothing but decoding sequences is in the step."""

    def add_decodes(
        self, sequences: list[LiveSequence], token_ids: list[int], blocks: dict[int, list[int]], silent: list[int]
    ) -> None:
        """Make the first rows: one token each, already counted in `num_computed_tokens`. Rows `silent` do not sample."""
        self.sequences = sequences
        self.stays = [s.stay for s in sequences]
        slots = [s.slot for s in sequences if s.slot is not None]
        behind = self.num_rounds - 1
        totals = [s.num_computed_tokens - behind for s in sequences]
        self.rows = DecodeSequences(slots, totals, token_ids, blocks)
        self.budget.take_decodes(len(slots), sum(totals))
        if silent:
            self.rows = list(self.rows)
            for i in silent:
                self.rows[i] = replace(self.rows[i], samples=False, position_of_sample=-1)

    def add_chunk(self, sequence: LiveSequence, count: int, now: float) -> None:
        """Add the next `count` known tokens of a running sequence; tells the worker about it if they are its first."""
        start, num_tokens, slot = sequence.num_computed_tokens, len(sequence.token_ids), sequence.slot
        assert slot is not None
        end = start + count
        self.budget.take(start, count)
        if isinstance(self.rows, DecodeSequences):
            self.rows = list(self.rows)
        new_blocks = NO_IDS
        if not sequence.is_started:
            sequence.is_started = True
            self.started.append(sequence.slot_start(slot))
            new_blocks = list(sequence.block_table)
            sequence.timing.first_scheduled = sequence.timing.first_scheduled or now
        samples = end == num_tokens < sequence.limit
        self.rows.append(
            ScheduledSequence(
                slot=slot,
                start=start,
                num_new_tokens=count,
                token_ids=sequence.token_ids[start:end],
                new_blocks=new_blocks,
                samples=samples,
                position_of_sample=end if samples else -1,
                num_prompt_logprobs=_num_prompt_logprobs(sequence, start, end),
            )
        )
        self.sequences.append(sequence)
        self.stays.append(sequence.stay)
        sequence.num_computed_tokens = end
        sequence.num_in_flight += samples


def _num_prompt_logprobs(sequence: LiveSequence, start: int, end: int) -> int:
    """Rows from `start` whose next token is a prompt token without logprobs so far; row p speaks of token p + 1."""
    if sequence.prompt_logprobs is None or not sequence.num_prompt_logprobs_missing:
        return 0
    if end <= len(sequence.prompt_logprobs):
        return 0  # Computed again after a preemption; the figures are here already.
    return max(min(end, sequence.num_prompt_tokens - 1) - start, 0)


def collect_prompt_logprobs(sequence: LiveSequence, start: int, entries: list[TokenLogprobs]) -> None:
    """Keep the entries of rows from `start`; a chunk that was computed twice brings the same entries twice."""
    if sequence.prompt_logprobs is not None:
        sequence.prompt_logprobs += entries[max(len(sequence.prompt_logprobs) - start, 0) :]
