"""Budgets: tokens, milliseconds, slots, the queue; nobody starves."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from samovar.config.engine import EngineConfig
from samovar.config.groups import CacheConfig, ModelConfig, SchedulerConfig
from samovar.core.step import SampledTokens, ScheduledStep, StepResult
from samovar.errors import ConfigError
from samovar.schedule.admission import House as RulesHouse
from samovar.schedule.admission import Need, has_blocks
from samovar.schedule.cache_groups import CacheGroup
from samovar.schedule.live import LiveRequest, make_sequences
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.scheduler import Scheduler
from samovar.schedule.step_time import StepTimeModel
from tests.schedule.drive import House, options, request


def seconds_of(step: ScheduledStep, slow: float = 1.0) -> float:
    """A machine: 4 ms a step, 0.2 ms a token, and attention over what lies before."""
    pairs = sum(s.num_new_tokens * s.start + s.num_new_tokens**2 / 2 for s in step.sequences)
    return slow * (0.004 + 0.0002 * step.num_tokens + 2e-8 * pairs)


class Machine:
    """A scheduler on a simulated clock."""

    def __init__(self, opts: SchedulerOptions, num_blocks: int = 4000) -> None:
        self.scheduler = Scheduler(opts, num_blocks)
        self.clock = 0.0
        self.slow = 1.0
        self.token_times: dict[str, list[float]] = {}
        self.steps: list[tuple[ScheduledStep, float]] = []

    def step(self) -> None:
        step = self.scheduler.schedule(self.clock)
        assert step is not None
        seconds = seconds_of(step, self.slow)
        self.clock += seconds
        self.steps.append((step, seconds))
        sampled = [SampledTokens(s.slot, [5]) for s in step.sequences if s.samples]
        for output in self.scheduler.update(step, StepResult(step.step_id, sampled, seconds=seconds), self.clock):
            self.token_times.setdefault(output.request_id, []).append(self.clock)


def served(target: float) -> SchedulerOptions:
    return SchedulerOptions(
        max_model_len=40_000, block_size=16, max_num_batched_tokens=4096, step_time_target=target, max_num_seqs=64
    )


def test_a_long_prompt_does_not_stall_a_stream() -> None:
    """B074: a steady stream beside a prompt of many budgets: gaps stay at the target, not at the budget's cost."""
    machine = Machine(served(0.030))
    machine.scheduler.add(request(50, id="stream", max_tokens=20_000, ignore_eos=True))
    for _ in range(50):
        machine.step()
    began = len(machine.steps)
    machine.scheduler.add(request(32_000, id="long", max_tokens=2, ignore_eos=True))
    while "long" not in machine.token_times:
        machine.step()
    gaps = sorted(b - a for a, b in pairwise(machine.token_times["stream"]))
    assert gaps[-1] <= 0.040, "a whole budget would take 0.8 s"
    # And the prompt gets what the target leaves: steps are used, not starved.
    used = [seconds for _, seconds in machine.steps[began + 20 : -1]]
    assert sum(used) / len(used) >= 0.024


def test_without_decodes_the_whole_budget_is_used() -> None:
    """The target protects streams; with none, prompts go at full speed."""
    machine = Machine(served(0.030))
    machine.scheduler.add(request(8192, max_tokens=1))
    machine.step()
    machine.step()
    assert [step.num_tokens for step, _ in machine.steps] == [4096, 4096]


def test_prefill_never_starves() -> None:
    """A target that decodes alone already miss still leaves prompts their share of every step."""
    machine = Machine(served(0.000_001))
    machine.scheduler.add(request(50, id="stream", max_tokens=20_000, ignore_eos=True))
    for _ in range(5):
        machine.step()
    machine.scheduler.add(request(2560, id="long", max_tokens=2))
    for _ in range(2560 // 16):
        machine.step()
    assert "long" in machine.token_times


def test_decodes_never_starve() -> None:
    """Every running sequence past its prompt gets its token in every step, whatever prompts wait."""
    house = House(options(max_num_batched_tokens=8, max_num_seqs=8, max_model_len=200), 400)
    stream = house.add(request(3, max_tokens=150, ignore_eos=True))
    house.launch()
    house.read()
    for _ in range(20):
        house.add(request(90, max_tokens=10, ignore_eos=True))
    for count in range(2, 150):
        house.launch()
        house.read()
        assert len(house.heard[stream.request_id, 0].token_ids) == count


def test_the_model_learns_a_changed_machine() -> None:
    """Twice as slow, or ten times, after the start: the steps come back to the target."""
    machine = Machine(served(0.060))
    machine.scheduler.add(request(50, id="stream", max_tokens=20_000, ignore_eos=True))
    for slow in (1.0, 2.0, 0.3):
        machine.slow = slow
        for _ in range(150):
            if machine.scheduler.stats().num_running < 2 and not machine.scheduler.stats().num_waiting:
                machine.scheduler.add(request(20_000, max_tokens=1))
            machine.step()
        late = [seconds for step, seconds in machine.steps[-30:] if len(step.sequences) > 1]
        assert late and 0.6 * 0.060 <= sum(late) / len(late) <= 1.15 * 0.060, slow


def test_time_model_recovers_the_machine() -> None:
    """The three coefficients are found from mixed steps; nothing is ever negative; nothing measured predicts 0."""
    model = StepTimeModel()
    assert model.predict(100, 1000) == 0.0 and model.tokens_within(1.0, 0) == float("inf")
    rng = random.Random(0)
    for _ in range(200):
        tokens, start = rng.randrange(1, 2000), rng.randrange(20_000)
        pairs = tokens * start + tokens * tokens // 2
        model.observe(tokens, pairs, 0.004 + 0.0002 * tokens + 2e-8 * pairs, has_prefill=rng.random() < 0.5)
    for tokens, pairs in ((1, 1), (500, 10_000), (1500, 20_000_000)):
        assert model.predict(tokens, pairs) == pytest.approx(0.004 + 0.0002 * tokens + 2e-8 * pairs, rel=0.01)
    size = model.tokens_within(0.1, 5000)
    assert 0.0002 * size + 2e-8 * (size * 5000 + size * size / 2) == pytest.approx(0.1, rel=0.02)
    assert model.tokens_within(-1.0, 0) == 0.0


def test_time_model_survives_noise_and_monotony() -> None:
    """Steps all alike, shrinking times, a slow first step: finite, never negative, and forgotten in time."""
    model = StepTimeModel()
    model.observe(512, 131_072, 30.0, has_prefill=True)  # The first step loads kernels.
    for _ in range(500):
        model.observe(8, 4000, 0.010, has_prefill=False)
    for tokens in range(40, 8, -1):
        model.observe(tokens, tokens * 500, 0.010 + 0.001 / tokens, has_prefill=True)
    for tokens in (1, 8, 64, 512):
        assert 0.0 <= model.predict(tokens, tokens * 500) < 0.1
    assert model.tokens_within(0.01, 100) >= 0


def test_room_to_grow() -> None:
    """B082: whoever starts leaves a block per running sequence and 16 steps of its prefill; doubled each time it lost."""
    asked = request(100)
    [sequence] = make_sequences(LiveRequest(asked, None, False), (0,), 200, overlaps=True)

    def least_free(num_running: int, num_steps: int) -> int:
        houses = (RulesHouse(CacheGroup((), 16), 64, free, num_running, 8) for free in range(1000))
        return next(h.num_free for h in houses if has_blocks(sequence, Need(7, num_steps), h) is None)

    assert [least_free(0, 50), least_free(1, 1), least_free(3, 16), least_free(3, 17)] == [7, 8, 10, 13]
    seen = []
    for sequence.num_displaced in (0, 1, 2, 6, 60):
        seen.append(least_free(3, 1))
    assert seen == [10, 13, 19, 71, 71], "never more than the pool: then it waits until it would run alone"
    assert least_free(0, 50) == 7


def test_long_prefill_threshold() -> None:
    """At most so many tokens of one prompt beside others, so that a short prompt gets in between; alone, no limit."""
    house = House(options(long_prefill_token_threshold=10, max_num_batched_tokens=24), 60)
    house.add(request(60, max_tokens=4))
    step = house.launch()
    assert step is not None and step.num_tokens == 24
    house.read()
    house.add(request(12, max_tokens=4))
    step = house.launch()
    assert step is not None and [s.num_new_tokens for s in step.sequences] == [10, 10]
    house.run()
    house.check_answers()


def test_without_chunks_a_prompt_is_one_step() -> None:
    """The budget is raised to the context; a prompt is never split, and waits rather than be split."""
    rng = random.Random(5)
    house = House(options(enable_chunked_prefill=False, max_num_batched_tokens=8), 100, depth=2)
    for _ in range(40):
        house.add(request(rng.randrange(1, 90), max_tokens=6, ignore_eos=True))
        house.launch() if len(house.launched) < 2 else house.read()
    house.run()
    house.check_answers()
    for step in house.steps:
        assert all(s.samples for s in step.sequences)


def test_tokens_are_never_in_flight_for_those_that_need_them() -> None:
    """`needs_output_ids`, or asynchronous scheduling off: scheduled only when every id is known; others overlap."""
    for async_on in (True, False):
        house = House(options(async_scheduling=async_on), 60, depth=2)
        for words in (None, [[3, 4]]):
            house.add(
                request(
                    6, max_tokens=20, ignore_eos=True, bad_words=["a b"] if words else [], bad_words_token_ids=words
                )
            )
        house.run()
        house.check_answers()
        fed: dict[bool, int] = {False: 0, True: 0}
        owners: dict[int, bool] = {}
        for step in house.steps:
            owners |= {s.slot: s.params.needs_output_ids for s in step.started}
            for s in step.sequences:
                fed[owners[s.slot]] += s.feeds_last_sample
        assert fed[True] == 0 and (fed[False] > 10) == async_on


def test_a_refused_request_leaves_no_trace() -> None:
    """Refusals change nothing; an id in use is refused and the first holder is unharmed (B013's kind)."""
    house = House(options(), 60)
    first = house.add(request(5, id="same"))
    with pytest.raises(ValueError, match="'same' is in use"):
        house.add(request(7, id="same"))
    with pytest.raises(ValueError, match="0 tokens"):
        house.add(request([]))
    house.heard = {key: heard for key, heard in house.heard.items() if key[0] == "same"}
    house.requests = {"same": first}
    house.run()
    house.check_answers()
    house.check_idle()


def test_options_come_from_a_resolved_configuration() -> None:
    """Milliseconds become seconds; an unresolved value is refused."""
    config = EngineConfig(
        model=ModelConfig(max_model_len=512),
        cache=CacheConfig(block_size=32, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_batched_tokens=128, step_time_target_ms=50.0, max_num_seqs=7),
    )
    made = SchedulerOptions.from_config(config)
    assert made.step_time_target == 0.05 and made.block_size == 32 and not made.enable_prefix_caching
    assert made.max_num_seqs == 7
    with pytest.raises(ConfigError, match="None"):
        SchedulerOptions.from_config(EngineConfig())
