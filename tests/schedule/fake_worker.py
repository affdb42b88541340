"""A worker without a model: its "K/V" entries are hashes of the whole prefix, so that every wrong read is noticed.

Entry p of a sequence is hash(entry p - 1, token p). The entry before a row is read through the block table, as a model
would, and compared with what the sequence's own tokens give. The next token is a function of the last entry and the
sampling key, so that a plain loop over the tokens (`reference`) must give the same answer.

With snapshots it is a hybrid model, too: the entry before is also what the slot's recurrent state must be.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from samovar.core.outputs import TokenLogprobs
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.step import DecodeSequences, SampledTokens, ScheduledSequence, ScheduledStep, SlotStart, StepResult
from samovar.schedule.live import sampling_key

VOCAB = 40
TORN = -1
"""What a failed row leaves in the cache."""


def entry(before: int, token: int) -> int:
    """K/V entry of `token` after the entry `before` (0 at the start)."""
    return hash((before, token)) & 0x7FFFFFFFFFFF


def next_token(last: int, params: SamplingParams, key: int, position: int) -> int:
    """The model and the sampler: greedy requests ignore the key."""
    draw = hash((last, 0 if params.is_greedy else key, position)) & 0x7FFFFFFFFFFF
    return draw % VOCAB


def masked(token: int, stop_ids: list[int], num_output: int, params: SamplingParams) -> int:
    """The sampler's part of `min_tokens`: a banned token is replaced by the next that is not."""
    while num_output < params.min_tokens and token in stop_ids:
        token = (token + 1) % VOCAB
    return token


@dataclass
class Answer:
    """What one choice should give."""

    token_ids: list[int]
    finish_reason: str
    stop_reason: int | str | None
    entries: list[int]
    """K/V entries of prompt and output, in order."""


def reference(request: Request, index: int, max_total: int) -> Answer:
    """One choice alone, token by token, with no scheduler: at most `max_total` tokens, prompt included."""
    params = request.params
    eos = set() if params.ignore_eos else set(request.eos_token_ids)
    key = 0 if params.seed is None else sampling_key(params.seed, index)
    entries: list[int] = []
    for token in request.prompt_token_ids:
        entries.append(entry(entries[-1] if entries else 0, token))
    output: list[int] = []
    assert params.max_tokens is not None
    while len(output) < params.max_tokens and len(entries) < max_total:
        token = next_token(entries[-1], params, key, len(entries))
        token = masked(token, sorted(eos | set(params.stop_token_ids)), len(output), params)
        output.append(token)
        entries.append(entry(entries[-1], token))
        if len(output) >= params.min_tokens:
            if token in eos:
                return Answer(output, "stop", None, entries)
            if token in params.stop_token_ids:
                return Answer(output, "stop", token, entries)
    return Answer(output, "length", None, entries)


@dataclass
class _Row:
    start: SlotStart
    tokens: list[int]
    num_started: int
    entries: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    is_torn: bool = False


class FakeWorker:
    """Runs steps in order and checks everything a step promises."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_slots: int,
        *,
        checks_all: bool = True,
        num_snapshots: int | None = None,
    ) -> None:
        self.num_snapshots = num_snapshots
        self.states: dict[int, int] = {}
        """Row of the recurrent state -> the entry of the last token it has seen; 0 before any."""
        self.block_size = block_size
        self.num_slots = num_slots
        self.cache = [0] * (num_blocks * block_size)
        self.rows: dict[int, _Row] = {}
        self.checks_all = checks_all
        self.fail_rate = 0.0
        self.random = random.Random(0)
        self.num_computed = 0

    def execute(self, step: ScheduledStep) -> StepResult:
        """Run a step; raises `AssertionError` if anything in it is wrong."""
        for slot in step.freed_slots:
            self.rows.pop(slot, None)
        for start in step.started:
            assert start.slot not in self.rows, f"slot {start.slot} is taken"
            assert 0 <= start.slot < self.num_slots
            self.rows[start.slot] = _Row(start, list(start.token_ids), len(start.token_ids))
            self.states[start.slot] = 0
        self._copy_states(step)
        slots = [s.slot for s in step.sequences]
        assert len(set(slots)) == len(slots), "a slot twice in one step"
        result = StepResult(step.step_id, seconds=0.001 + 0.0001 * step.num_tokens)
        for sequence in step.sequences:
            self._run(sequence, self.rows[sequence.slot], result)
        if step.num_rounds > 1:
            assert isinstance(step.sequences, DecodeSequences), "rounds of something else than decoding sequences"
            for count in range(1, step.num_rounds):
                for sequence in step.sequences.later(count):
                    self._run(sequence, self.rows[sequence.slot], result)
            result.sampled = _joined(result.sampled)
        for source, target in step.state_saves:
            assert source in slots and self._is_snapshot(target), "a snapshot of nobody, or nowhere"
            self.states[target] = self.states[source]
        return result

    def _copy_states(self, step: ScheduledStep) -> None:
        if self.num_snapshots is None:
            assert not step.state_copies and not step.state_saves
        else:
            assert step.num_rounds == 1, "no snapshot could be taken within rounds"
        started = {start.slot for start in step.started}
        for source, target in step.state_copies:
            assert target in started and self._is_snapshot(source)
            self.states[target] = self.states[source]

    def _is_snapshot(self, row: int) -> bool:
        """Behind the rows of slots there is a spare one."""
        assert self.num_snapshots is not None
        return self.num_slots < row <= self.num_slots + self.num_snapshots

    def _run(self, sequence: ScheduledSequence, row: _Row, result: StepResult) -> None:
        row.table += sequence.new_blocks
        assert len(row.start.token_ids) == row.num_started, "the list given to the worker went on changing"
        end = sequence.start + sequence.num_new_tokens
        assert sequence.num_new_tokens > 0 and end <= len(row.table) * self.block_size, "no block to write to"
        assert end <= len(row.tokens), "a token that was never sampled"
        known = row.tokens[sequence.start : end]
        assert sequence.token_ids == (known[:-1] if sequence.feeds_last_sample else known), "wrong tokens"
        while len(row.entries) < len(row.tokens):
            row.entries.append(entry(row.entries[-1] if row.entries else 0, row.tokens[len(row.entries)]))
        self.num_computed += sequence.num_new_tokens
        if row.is_torn or (self.fail_rate and self.random.random() < self.fail_rate):
            row.is_torn = True
            for p in range(sequence.start, end):
                self.cache[self._place(row, p)] = TORN
            self.states[sequence.slot] = TORN
            result.failed[sequence.slot] = "this row failed"
            if sequence.samples:
                row.tokens.append(0)  # So that a step already launched finds a token to feed.
            return
        self._check_reads(sequence, row)
        before = row.entries[sequence.start - 1] if sequence.start else 0
        if self.num_snapshots is not None:
            assert self.states[sequence.slot] == before, f"the state before {sequence.start} is of another prefix"
        self.states[sequence.slot] = row.entries[end - 1]
        for p in range(sequence.start, end):
            before = self.cache[self._place(row, p - 1)] if p else 0
            self.cache[self._place(row, p)] = entry(before, row.tokens[p])
        if sequence.num_prompt_logprobs:
            result.prompt_logprobs[sequence.slot] = [
                TokenLogprobs([row.tokens[p + 1]], [float(self.cache[self._place(row, p)])], 1)
                for p in range(sequence.start, sequence.start + sequence.num_prompt_logprobs)
            ]
        if sequence.samples:
            assert sequence.position_of_sample == end == len(row.tokens)
            self._sample(sequence.slot, row, result)

    def _sample(self, slot: int, row: _Row, result: StepResult) -> None:
        start, position = row.start, len(row.tokens)
        last = self.cache[self._place(row, position - 1)]
        token = next_token(last, start.params, start.sampling_key, position)
        token = masked(token, start.stop_token_ids, position - start.num_prompt_tokens, start.params)
        row.tokens.append(token)
        logprobs = None if start.params.logprobs is None else [TokenLogprobs([token], [float(last)], 1)]
        result.sampled.append(SampledTokens(slot, [token], logprobs))

    def _check_reads(self, sequence: ScheduledSequence, row: _Row) -> None:
        first = 0 if self.checks_all else max(sequence.start - 1, 0)
        for p in range(first, sequence.start):
            assert self.cache[self._place(row, p)] == row.entries[p], f"position {p} holds another prefix"

    def _place(self, row: _Row, position: int) -> int:
        return row.table[position // self.block_size] * self.block_size + position % self.block_size


def _joined(rows: Sequence[SampledTokens]) -> list[SampledTokens]:
    """What each slot sampled in all rounds."""
    found: dict[int, SampledTokens] = {}
    for row in rows:
        into = found.setdefault(row.slot, SampledTokens(row.slot, [], None if row.logprobs is None else []))
        into.token_ids += row.token_ids
        if into.logprobs is not None and row.logprobs is not None:
            into.logprobs += row.logprobs
    return list(found.values())
