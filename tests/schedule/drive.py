"""Drives a scheduler with the fake worker, and checks its invariants after every call."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from samovar.core.outputs import SequenceOutput, TokenLogprobs
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.sequence import FinishReason, SequenceStatus
from samovar.core.step import PlainTokens, ScheduledStep, StepResult
from samovar.schedule.options import SchedulerOptions, SnapshotRules
from samovar.schedule.prefix_cache import PrefixKey
from samovar.schedule.scheduler import Scheduler
from tests.schedule.fake_worker import VOCAB, FakeWorker, reference

EOS = [0, 1]


def options(**changes: object) -> SchedulerOptions:
    """Small settings that make everything happen soon."""
    defaults: dict[str, object] = {
        "max_model_len": 96,
        "block_size": 4,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 24,
    }
    return SchedulerOptions(**{**defaults, **changes})  # type: ignore[arg-type]


_serial = 0


def request(
    prompt: list[int] | int,
    *,
    priority: int = 0,
    salt: str | None = None,
    eos: list[int] | None = None,
    id: str | None = None,
    **params: object,
) -> Request:
    """A request; an int stands for a prompt of that many tokens of its own."""
    global _serial
    _serial += 1
    ids = [2 + (_serial * 31 + k * 7) % 38 for k in range(prompt)] if isinstance(prompt, int) else prompt
    settings: dict[str, object] = {"max_tokens": 8, "temperature": 0.0, **params}
    return Request(
        request_id=id or f"r{_serial}",
        prompt_token_ids=ids,
        params=SamplingParams(**settings),  # type: ignore[arg-type]
        eos_token_ids=EOS if eos is None else eos,
        arrival=float(_serial),
        priority=priority,
        cache_salt=salt,
    )


def as_columns(result: StepResult) -> StepResult:
    """The same result as a device gives it: in columns, if it is no more than one token each."""
    rows = result.sampled
    if all(len(row.token_ids) == 1 and row.logprobs is None for row in rows):
        result.sampled = PlainTokens([row.slot for row in rows], [row.token_ids[0] for row in rows])
    return result


@dataclass
class Heard:
    """What one choice has sent."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    outputs: list[SequenceOutput] = field(default_factory=list)

    @property
    def end(self) -> SequenceOutput | None:
        return self.outputs[-1] if self.outputs and self.outputs[-1].finish_reason else None


class House:
    """A scheduler, a fake worker, steps in flight, and everything that was heard."""

    def __init__(self, opts: SchedulerOptions, num_blocks: int = 24, *, depth: int = 1, checks: bool = True) -> None:
        self.options = opts
        self.num_blocks = num_blocks
        self.depth = depth
        self.checks = checks
        self.gives_columns = False
        self.scheduler = Scheduler(opts, num_blocks)
        self.worker = FakeWorker(
            num_blocks, opts.block_size, opts.max_num_seqs, checks_all=checks, num_snapshots=opts.num_snapshots
        )
        self.launched: deque[ScheduledStep] = deque()
        self.heard: dict[tuple[str, int], Heard] = {}
        self.requests: dict[str, Request] = {}
        self.aborted: set[tuple[str, int]] = set()
        self.now = 0.0
        self.steps: list[ScheduledStep] = []
        self.budget = opts.max_num_batched_tokens
        if not opts.enable_chunked_prefill:
            self.budget = max(self.budget, opts.max_model_len)

    def add(self, request: Request) -> Request:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        for index in range(request.params.n):
            self.heard[request.request_id, index] = Heard()
        self.check()
        return request

    def launch(self) -> ScheduledStep | None:
        """Schedule one step; it runs when its result is read, so that shared lists would be caught."""
        self.now += 1.0
        step = self.scheduler.schedule(self.now)
        if step is not None:
            assert step.sequences and step.num_tokens <= self.budget * step.num_rounds
            assert len(step.sequences) <= self.options.max_num_seqs
            self.launched.append(step)
            self.steps.append(step)
        self.check()
        return step

    def read(self) -> StepResult | None:
        """Run the oldest launched step and book it."""
        if not self.launched:
            return None
        step = self.launched.popleft()
        result = self.worker.execute(step)
        if self.gives_columns:
            result = as_columns(result)
        self.hear(self.scheduler.update(step, result, self.now))
        self.check()
        return result

    def fail_step(self) -> None:
        """The oldest step does its work, then fails as a whole."""
        step = self.launched.popleft()
        self.worker.execute(step)
        for sequence in step.sequences:
            row = self.worker.rows[sequence.slot]
            row.is_torn = True
            for p in range(sequence.start, sequence.start + sequence.num_new_tokens + step.num_rounds - 1):
                self.worker.cache[self.worker._place(row, p)] = -1
            self.worker.states[sequence.slot] = -1
        for _, target in step.state_saves:
            self.worker.states[target] = -1
        self.hear(self.scheduler.fail_step(step, "the whole step failed"))
        self.check()

    def abort(self, request_id: str, index: int | None = None) -> list[SequenceOutput]:
        outputs = self.scheduler.abort(request_id, index)
        self.aborted |= {(o.request_id, o.index) for o in outputs}
        self.hear(outputs)
        self.check()
        return outputs

    def hear(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            heard = self.heard[output.request_id, output.index]
            assert heard.end is None, "news after the end"
            assert output.token_ids or output.finish_reason, "news of nothing"
            wants = self.requests[output.request_id].params.prompt_logprobs is not None and output.index == 0
            is_ended_early = output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)
            if not is_ended_early:
                assert (output.prompt_logprobs is not None) == (wants and not heard.outputs)
            assert (output.timing is not None) == (output.finish_reason is not None)
            heard.token_ids += output.token_ids
            heard.logprobs += output.logprobs or []
            heard.outputs.append(output)

    def run(self, max_steps: int = 20_000) -> None:
        """Until nothing is left; the bound stands for "for ever"."""
        for _ in range(max_steps):
            while len(self.launched) < self.depth and self.launch() is not None:
                pass
            if not self.launched:
                assert not self.scheduler.has_work, "work is left and nothing can run"
                return
            self.read()
        raise AssertionError(f"not done after {max_steps} steps")

    # What must always hold.

    def check(self) -> None:
        """Blocks, references, slots and places agree with each other."""
        if not self.checks:
            return
        scheduler, pool = self.scheduler, self.scheduler._pool
        running = scheduler._running
        assert running == sorted(running, key=lambda s: s.rank)
        held = Counter(block for s in running for block in s.block_table)
        for block in range(self.num_blocks):
            assert pool.ref_count(block) == held[block], f"block {block}"
        free = pool.free_ids()
        assert sorted(free) == [b for b in range(self.num_blocks) if not held[b]] and len(free) == pool.num_free
        assert all(pool._digests[pool._index[d]] == d for d in pool._index)
        slots = [s.slot for s in running] + scheduler._free_slots
        assert sorted(s for s in slots if s is not None) == list(range(scheduler._max_running))
        for s in running:
            assert s.status is SequenceStatus.RUNNING and len(set(s.block_table)) == len(s.block_table)
            assert 0 <= s.num_computed_tokens <= len(s.block_table) * self.options.block_size
            assert len(s.token_ids) + s.num_in_flight <= s.limit or s.limit <= s.num_prompt_tokens
        waiting = list(scheduler._waiting._members)
        deferred = [s for r in scheduler._requests.values() for s in r.deferred]
        live = [s for r in scheduler._requests.values() for s in r.live.values()]
        assert Counter(map(id, running + waiting + deferred)) == Counter(map(id, live))
        for s in waiting + deferred:
            assert not s.block_table and s.slot is None and s.num_computed_tokens == 0
        stats = scheduler._counters
        assert stats.num_live == len(live)
        self.check_snapshots()

    def check_snapshots(self) -> None:
        """Every row is free, written to by a launched step, known, or only wanted still: one of these."""
        snapshots = self.scheduler._snapshots
        if snapshots is None:
            return
        wanted = Counter(s.restored for s in self.scheduler._running if s.restored is not None)
        known = list(snapshots.rows._index.values())
        assert all(s.num_pins == wanted[s] for s in {*known, *wanted})
        planned = [save.row for draft in self.scheduler._launched.values() for save in draft.saves]
        rows = [*snapshots.rows._free, *planned, *(s.row for s in {*known, *wanted})]
        first, count = self.options.max_num_seqs + 1, self.options.num_snapshots or 0
        assert sorted(rows) == list(range(first, first + count))

    def check_published(self) -> None:
        """Recompute the content of every published block that any request of this house could have published."""
        pool, size = self.scheduler._pool, self.options.block_size
        num_checked = 0
        for request_id, index in self.heard:
            request = self.requests[request_id]
            key = PrefixKey(
                identity=self.scheduler._identity,
                block_size=size,
                cache_salt=request.cache_salt,
                generation=self.scheduler._generation,
            )
            digest = key.digest()
            answer = reference(request, index, self.max_total)
            tokens = request.prompt_token_ids + answer.token_ids
            for i in range(len(tokens) // size):
                digest = self.scheduler._cache.block_digest(digest, tokens[i * size : (i + 1) * size])
                if (block := pool.find(digest)) is not None:
                    content = self.worker.cache[block * size : (block + 1) * size]
                    assert content == answer.entries[i * size : (i + 1) * size], "a torn block was published"
                    num_checked += 1
        self.num_published_checked = num_checked

    def check_states(self) -> None:
        """Every snapshot that is known is what its prefix gives."""
        if self.scheduler._snapshots is None:
            return
        found = dict(self.scheduler._snapshots.rows._index)
        for (request_id, index), _ in self.heard.items():
            request = self.requests[request_id]
            digest = PrefixKey(
                identity=self.scheduler._identity,
                block_size=(size := self.options.block_size),
                cache_salt=request.cache_salt,
                generation=self.scheduler._generation,
            ).digest()
            answer = reference(request, index, self.max_total)
            tokens = request.prompt_token_ids + answer.token_ids
            for end in range(size, len(tokens) + 1, size):
                digest = self.scheduler._cache.block_digest(digest, tokens[end - size : end])
                if (snapshot := found.get(digest)) is not None:
                    assert self.worker.states[snapshot.row] == answer.entries[end - 1]

    def check_idle(self) -> None:
        """Nothing is held by anybody."""
        usage = self.scheduler.block_usage()
        assert usage["used"] == usage["used_slots"] == usage["requests"] == usage["sequences"] == 0
        assert usage["launched_steps"] == 0 and usage["free"] == self.num_blocks
        assert not self.scheduler._waiting._members and len(self.scheduler._waiting._heap) <= 16

    @property
    def max_total(self) -> int:
        return min(self.options.max_model_len, self.num_blocks * self.options.block_size + 1)

    def check_answers(self) -> None:
        """Every choice that ran to its end gave what it gives alone; one cut short gave the beginning of that."""
        for (request_id, index), heard in self.heard.items():
            request = self.requests[request_id]
            assert heard.end is not None, f"{request_id}/{index} never ended"
            answer = reference(request, index, self.max_total)
            if heard.end.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert heard.token_ids == answer.token_ids[: len(heard.token_ids)]
                assert heard.end.finish_reason is FinishReason.ERROR or (request_id, index) in self.aborted
                continue
            assert heard.token_ids == answer.token_ids, f"{request_id}/{index}"
            assert heard.end.finish_reason is not None and heard.end.finish_reason.value == answer.finish_reason
            assert heard.end.stop_reason == answer.stop_reason
            length = len(request.prompt_token_ids)
            if request.params.logprobs is not None:
                entries = answer.entries[length - 1 : -1] if answer.token_ids else []
                assert [e.token_ids[0] for e in heard.logprobs] == answer.token_ids
                assert [e.logprobs[0] for e in heard.logprobs] == entries
            if request.params.prompt_logprobs is not None and index == 0:
                rows = heard.outputs[0].prompt_logprobs
                assert rows is not None and rows[0] is None and len(rows) == length
                rest = [r for r in rows[1:] if r is not None]
                assert [r.token_ids[0] for r in rest] == request.prompt_token_ids[1:]
                assert [r.logprobs[0] for r in rest] == answer.entries[: length - 1]


def random_request(rng: random.Random, opts: SchedulerOptions, num_blocks: int) -> Request:
    """Anything that may enter: shared beginnings, n up to 4, every way to end."""
    longest = min(opts.max_model_len, num_blocks * opts.block_size)
    family = rng.randrange(3)
    base = [2 + (family * 11 + k * 5) % 38 for k in range(rng.randrange(0, longest))]
    tail = [rng.randrange(2, VOCAB) for _ in range(rng.randrange(1, 12))]
    prompt = (base + tail)[-longest:] if rng.random() < 0.2 else (base + tail)[:longest]
    room = opts.max_model_len - len(prompt)
    max_tokens = rng.choice([0, 1, 2, 5, 12, 30, room])
    max_tokens = max(0, min(max_tokens, room))
    n = rng.choice([1, 1, 1, 2, 4])
    greedy = n == 1 and rng.random() < 0.5
    with_bad_words = rng.random() < 0.1
    return request(
        prompt,
        priority=rng.randrange(-2, 3),
        salt=rng.choice([None, None, None, "a", "b"]),
        n=n,
        max_tokens=max_tokens,
        min_tokens=rng.randrange(0, max_tokens + 1) if rng.random() < 0.2 else 0,
        temperature=0.0 if greedy else 1.0,
        seed=rng.randrange(1000),
        ignore_eos=rng.random() < 0.4,
        stop_token_ids=rng.sample(range(40), rng.randrange(0, 3)),
        logprobs=rng.choice([None, 1]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        bad_words=["x y"] if with_bad_words else [],
        bad_words_token_ids=[[3, 4]] if with_bad_words else None,
        skip_reading_prefix_cache=rng.choice([None, None, None, True, False]),
    )


def random_options(rng: random.Random) -> SchedulerOptions:
    """Any sensible or silly combination."""
    num_snapshots = rng.choice([None, None, 0, 1, 3, 20])
    rules = SnapshotRules(
        margin=rng.choice([0, 1, 5]),
        least_gain=rng.choice([1, 4, 16]),
        interval=rng.choice([4, 10, 1000]),
        decode_interval=rng.choice([1, 4, 8]),
        decode_share=rng.choice([0.5, 1.0]),
    )
    return options(
        block_size=rng.choice([1, 2, 4, 8]),
        max_model_len=rng.choice([40, 96]),
        max_num_seqs=rng.randrange(1, 9),
        max_num_batched_tokens=rng.choice([1, 3, 8, 24, 64]),
        enable_chunked_prefill=rng.random() < 0.8,
        long_prefill_token_threshold=rng.choice([0, 0, 5]),
        step_time_target=rng.choice([0.0, 0.0, 0.002]),
        scheduling_policy=rng.choice(["fcfs", "priority"]),
        async_scheduling=rng.random() < 0.8,
        enable_prefix_caching=rng.random() < 0.75,
        rounds_seconds=rng.choice([0.0, 0.003, 0.01]) if num_snapshots is None else 0.0,
        num_snapshots=num_snapshots,
        snapshot_rules=rules,
    )
