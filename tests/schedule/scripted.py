"""Constraints without grammars: what may come next is a hash of what came before, so that every wrong mask is noticed."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass, field

import numpy as np

from samovar.core.constraint import Constraint
from samovar.core.request import Request
from samovar.core.step import ScheduledSequence, ScheduledStep, StepResult, TokenMasks
from samovar.schedule.live import TokenMatcher, sampling_key
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.scheduler import Scheduler
from tests.schedule.drive import House
from tests.schedule.fake_worker import VOCAB, FakeWorker, _Row, entry, next_token

WORDS = -(-VOCAB // 32)


@dataclass(frozen=True)
class Script:
    """`free` tokens may be anything, then each is one of a few; over after `length`. `delay` polls until it is ready."""

    seed: int
    length: int
    free: int = 0
    delay: int = 0
    fails_to_start: bool = False
    fails_at: int | None = None
    """Index of the output token for which no mask can be made."""
    vocab: int = VOCAB

    def constraint(self) -> Constraint:
        return Constraint(grammar=json.dumps(asdict(self)))

    def allowed(self, output: tuple[int, ...]) -> set[int] | None:
        """What may follow; None: anything."""
        if len(output) < self.free:
            return None
        rng = random.Random(hash((self.seed, output)))
        return set(rng.sample(range(self.vocab), rng.choice([1, 2, 5, 20])))


def script_of(request: Request) -> Script | None:
    if request.constraint is None:
        return None
    assert request.constraint.grammar is not None
    return Script(**json.loads(request.constraint.grammar))


@dataclass
class ScriptedMatcher:
    script: Script
    output: tuple[int, ...] = ()
    error: str | None = None

    @property
    def is_finished(self) -> bool:
        return len(self.output) >= self.script.length

    def advance(self, token_id: int) -> None:
        allowed = self.script.allowed(self.output)
        assert self.error is None and not self.is_finished
        assert allowed is None or token_id in allowed, "a token that the mask did not allow, or of another sequence"
        self.output += (token_id,)


@dataclass
class ScriptedBeginning:
    script: Script
    num_polls: int = 0
    is_cancelled: bool = False

    def done(self) -> bool:
        assert not self.is_cancelled
        self.num_polls += 1
        return self.num_polls > self.script.delay

    def result(self) -> ScriptedMatcher:
        assert self.num_polls > self.script.delay
        if self.script.fails_to_start:
            raise ValueError("no such grammar")
        return ScriptedMatcher(self.script)

    def cancel(self) -> bool:
        self.is_cancelled = True
        return True


@dataclass
class ScriptedEnforcer:
    beginnings: list[ScriptedBeginning] = field(default_factory=list)

    def begin(self, constraint: Constraint) -> ScriptedBeginning:
        assert constraint.grammar is not None
        self.beginnings.append(ScriptedBeginning(Script(**json.loads(constraint.grammar))))
        return self.beginnings[-1]

    def masks(self, rows: list[tuple[int, TokenMatcher]]) -> TokenMasks | None:
        slots, words = [], []
        for slot, matcher in rows:
            assert isinstance(matcher, ScriptedMatcher) and not matcher.is_finished
            if len(matcher.output) == matcher.script.fails_at:
                matcher.error = "the script ends here"
            allowed = matcher.script.allowed(matcher.output)
            if allowed is not None and matcher.error is None:
                slots.append(slot)
                words.append(bits(allowed, matcher.script.vocab))
        return TokenMasks(slots, np.array(words)) if slots else None


def bits(allowed: set[int], vocab: int = VOCAB) -> np.ndarray:
    flags = np.zeros(-(-vocab // 32) * 32, np.uint8)
    flags[list(allowed)] = 1
    return np.packbits(flags, bitorder="little").view(np.int32)


class MaskingWorker(FakeWorker):
    """Samples within the masks of the step, and knows by itself which ones there must be."""

    masks: dict[int, set[int]]
    num_masked = 0

    def execute(self, step: ScheduledStep) -> StepResult:
        self.masks = {}
        if step.masks is not None:
            assert step.masks.words.shape == (len(step.masks.slots), WORDS)
            for slot, row in zip(step.masks.slots, step.masks.words, strict=True):
                flags = np.unpackbits(np.ascontiguousarray(row).view(np.uint8), bitorder="little")
                self.masks[slot] = set(np.flatnonzero(flags).tolist())
        sampling = {s.slot for s in step.sequences if s.samples}
        assert self.masks.keys() <= sampling, "a mask for a row that samples nothing"
        self.num_masked += len(self.masks)
        return super().execute(step)

    def _run(self, sequence: ScheduledSequence, row: _Row, result: StepResult) -> None:
        if sequence.slot in self.masks:
            assert not sequence.feeds_last_sample, "a mask made without the last token"
        super()._run(sequence, row, result)

    def _sample(self, slot: int, row: _Row, result: StepResult) -> None:
        super()._sample(slot, row, result)
        start, position = row.start, len(row.tokens) - 1
        num_output = position - start.num_prompt_tokens
        token = chosen(row.tokens[-1], self.masks.get(slot), start.stop_token_ids, num_output, start.params.min_tokens)
        if token is None:
            result.sampled.pop()
            result.failed[slot] = "everything is forbidden"
            return
        row.tokens[-1] = token
        sampled = result.sampled[-1]
        sampled.token_ids = [token]
        if sampled.logprobs:
            sampled.logprobs[0].token_ids = [token]


def chosen(token: int, allowed: set[int] | None, stops: list[int], num_output: int, min_tokens: int) -> int | None:
    """The next token from `token` on that is allowed."""
    for i in range(VOCAB):
        candidate = (token + i) % VOCAB
        is_banned = num_output < min_tokens and candidate in stops
        if not is_banned and (allowed is None or candidate in allowed):
            return candidate
    return None


def constrained_reference(request: Request, index: int, max_total: int) -> tuple[list[int], str]:
    """One choice alone, token by token: (output, finish reason)."""
    params, script = request.params, script_of(request)
    eos = set() if params.ignore_eos else set(request.eos_token_ids)
    stops = eos | set(params.stop_token_ids)
    key = 0 if params.seed is None else sampling_key(params.seed, index)
    last, length, output = 0, len(request.prompt_token_ids), list[int]()
    for token in request.prompt_token_ids:
        last = entry(last, token)
    assert params.max_tokens is not None
    if script is not None and script.fails_to_start:
        return [], "error"
    while len(output) < params.max_tokens and length + len(output) < max_total:
        if script is not None and len(output) == script.fails_at:
            return output, "error"
        allowed = None if script is None else script.allowed(tuple(output))
        drawn = next_token(last, params, key, length + len(output))
        token = chosen(drawn, allowed, sorted(stops), len(output), params.min_tokens)
        if token is None:
            return output, "error"
        output.append(token)
        last = entry(last, token)
        if token in stops and len(output) >= params.min_tokens:
            return output, "stop"
        if script is not None and len(output) >= script.length:
            return output, "stop"
    return output, "length"


class ConstrainedHouse(House):
    """A house whose scheduler takes scripted constraints."""

    def __init__(self, opts: SchedulerOptions, num_blocks: int = 24, *, depth: int = 1) -> None:
        super().__init__(opts, num_blocks, depth=depth)
        self.enforcer = ScriptedEnforcer()
        self.scheduler = Scheduler(opts, num_blocks, enforcer=self.enforcer)
        self.worker = MaskingWorker(num_blocks, opts.block_size, opts.max_num_seqs, num_snapshots=opts.num_snapshots)

    def launch(self) -> ScheduledStep | None:
        self.hear(self.scheduler.let_in())
        return super().launch()

    def run(self, max_steps: int = 20_000) -> None:
        for _ in range(max_steps):
            while len(self.launched) < self.depth and self.launch() is not None:
                pass
            if not self.launched and not self.scheduler.has_work:
                return
            assert self.launched or self.scheduler._constraints.held, "work is left and nothing can run"
            self.read()
        raise AssertionError(f"not done after {max_steps} steps")

    def check(self) -> None:
        """Sequences held back count as waiting."""
        held = self.scheduler._constraints.held
        waiting = self.scheduler._waiting
        waiting._members |= set(held)
        try:
            super().check()
        finally:
            waiting._members -= set(held)

    def check_answers(self) -> None:
        for (request_id, index), heard in self.heard.items():
            request = self.requests[request_id]
            assert heard.end is not None and heard.end.finish_reason is not None, f"{request_id}/{index} never ended"
            expected, reason = constrained_reference(request, index, self.max_total)
            if heard.end.finish_reason.value == "abort":
                assert (request_id, index) in self.aborted
                assert heard.token_ids == expected[: len(heard.token_ids)]
                continue
            assert (heard.token_ids, heard.end.finish_reason.value) == (expected, reason), f"{request_id}/{index}"
            if reason == "error":
                assert heard.end.error is not None
            if request.params.logprobs is not None and reason != "error":
                assert [e.token_ids[0] for e in heard.logprobs] == heard.token_ids
