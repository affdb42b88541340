"""Properties that hold whatever comes: every request ends, nothing leaks, answers are those of a run alone."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from samovar.errors import ValidationError
from tests.schedule.drive import House, options, random_options, random_request, request

SEEDS = st.integers(0, 2**32 - 1)


class SchedulerMachine(RuleBasedStateMachine):
    """Any order of requests, steps, results, aborts, failures and resets."""

    @initialize(seed=SEEDS)
    def build(self, seed: int) -> None:
        self.random = random.Random(seed)
        opts = random_options(self.random)
        self.house = House(opts, self.random.randrange(3, 40), depth=2)
        self.house.gives_columns = seed % 2 == 1

    @rule(count=st.integers(1, 3))
    def add(self, count: int) -> None:
        for _ in range(count):
            self.house.add(random_request(self.random, self.house.options, self.house.num_blocks))

    @precondition(lambda self: len(self.house.launched) < 2)
    @rule()
    def launch(self) -> None:
        self.house.launch()

    @precondition(lambda self: self.house.launched)
    @rule()
    def read(self) -> None:
        self.house.read()

    @rule(steps=st.integers(1, 8))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            while len(self.house.launched) < 2 and self.house.launch() is not None:
                pass
            self.house.read()

    @precondition(lambda self: self.house.heard)
    @rule(whole=st.booleans())
    def abort(self, whole: bool) -> None:
        request_id, index = self.random.choice(list(self.house.heard))
        self.house.abort(request_id, None if whole else index)

    @precondition(lambda self: self.house.launched)
    @rule()
    def fail_one_row(self) -> None:
        self.house.worker.fail_rate = 0.3
        self.house.read()
        self.house.worker.fail_rate = 0.0

    @precondition(lambda self: self.house.launched)
    @rule()
    def fail_step(self) -> None:
        self.house.fail_step()

    @rule()
    def reset_prefix_cache(self) -> None:
        self.house.scheduler.reset_prefix_cache()

    @invariant()
    def published_blocks_are_whole(self) -> None:
        if hasattr(self, "house"):
            self.house.check_published()
            if not self.house.launched:
                self.house.check_states()

    def teardown(self) -> None:
        if hasattr(self, "house"):
            self.house.run()
            self.house.check_answers()
            self.house.check_published()
            self.house.check_states()
            self.house.check_idle()


SchedulerMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestScheduler = SchedulerMachine.TestCase


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=SEEDS, depth=st.integers(1, 3))
def test_every_answer_is_that_of_a_run_alone(seed: int, depth: int) -> None:
    """B080, B083, B103: preempted, chunked, cached, overlapped, in any mixture; every published block recomputed."""
    rng = random.Random(seed)
    opts = random_options(rng)
    house = House(opts, rng.choice([6, 12, 24, 60]), depth=depth)
    for _ in range(rng.randrange(1, 25)):
        house.add(random_request(rng, opts, house.num_blocks))
        for _ in range(rng.randrange(0, 4)):
            house.launch() if len(house.launched) < depth else house.read()
    house.run()
    house.check_answers()
    house.check_published()
    house.check_states()
    house.check_idle()


def test_thousands_of_requests_in_seconds() -> None:
    """10,000 random requests on a small pool, overlapped: all end, with the right answers, and nothing is held."""
    rng = random.Random(7)
    opts = options(max_num_seqs=64, max_num_batched_tokens=256, block_size=8)
    house = House(opts, 60, depth=2, checks=False)
    for i in range(10_000):
        house.add(random_request(rng, opts, house.num_blocks))
        if i % 4 == 0:
            house.launch() if len(house.launched) < 2 else house.read()
    house.run(200_000)
    house.check_answers()
    house.check_idle()
    assert house.scheduler.stats().num_preemptions > 10


@pytest.mark.parametrize("overlap", [1, 2])
def test_preemption_is_bounded(overlap: int) -> None:
    """B082: a pool far too small for the running ones; nobody is preempted more often than log2(blocks) times or so."""
    rng = random.Random(1)
    for num_blocks in (8, 24, 40):
        house = House(options(max_num_seqs=16, max_num_batched_tokens=16), num_blocks, depth=overlap)
        for _ in range(60):
            length = rng.randrange(1, min(90, num_blocks * 4))
            house.add(request(length, max_tokens=min(96 - length, 60), ignore_eos=True))
        house.run()
        house.check_answers()
        counts = [h.end.timing.num_preemptions for h in house.heard.values() if h.end and h.end.timing]
        assert max(counts) <= math.log2(num_blocks) + 2
    assert house.scheduler.stats().num_preemptions > 0


def test_resume_waits_until_the_whole_recompute_fits() -> None:
    """B082 as reported: 40 blocks of 16, 32 tokens a step, a prompt of 300 beside growing neighbours."""
    opts = options(block_size=16, max_model_len=640, max_num_seqs=8, max_num_batched_tokens=32)
    house = House(opts, 40, depth=2)
    for _ in range(4):
        house.add(request(40, max_tokens=120, ignore_eos=True))
    house.add(request(300, max_tokens=40, ignore_eos=True))
    house.run(2000)
    house.check_answers()
    # Without the rule it is resumed for one chunk at a time; the work stays near that of a run without preemption.
    assert house.worker.num_computed <= 2 * (4 * 160 + 340)


@pytest.mark.parametrize("length", [95, 96, 97])
def test_prompt_at_the_context_limit(length: int) -> None:
    """B016: one less, the limit, one more: all defined, and the next request is served at once."""
    house = House(options(), 40, depth=2)
    for _ in range(20):
        if length > 96:
            with pytest.raises(ValidationError, match="97 tokens"):
                house.add(request(length, max_tokens=4))
        else:
            first = house.add(request(length, max_tokens=4, ignore_eos=True))
        after = house.add(request(5, max_tokens=3, ignore_eos=True))
        house.run(100)
        if length <= 96:
            end = house.heard[first.request_id, 0]
            assert len(end.token_ids) == 96 - length and end.end and end.end.finish_reason == "length"
        assert len(house.heard[after.request_id, 0].token_ids) == 3
    house.check_idle()


def test_larger_than_the_pool() -> None:
    """B085: a prompt over the pool is refused; output that outgrows it ends with `length` at the limit."""
    for depth in (1, 2):
        house = House(options(block_size=16, max_model_len=400, max_num_batched_tokens=400), 6, depth=depth)
        with pytest.raises(ValidationError, match="holds 96"):
            house.add(request(97))
        grows = house.add(request(90, max_tokens=50, ignore_eos=True))
        fills = house.add(request(96, max_tokens=50, ignore_eos=True))
        house.run(200)
        house.check_answers()
        for asked in (grows, fills):
            heard = house.heard[asked.request_id, 0]
            assert heard.end and heard.end.finish_reason == "length"
            # The last token needs no place in the cache.
            assert len(asked.prompt_token_ids) + len(heard.token_ids) == 97
        house.check_idle()
