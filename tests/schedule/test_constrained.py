"""Constrained sequences in the scheduler: held back, masked, advanced, finished, preempted; E18, and the seam of B119."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.core.step import SampledTokens, StepResult
from samovar.errors import ValidationError
from samovar.schedule.options import SchedulerOptions
from tests.schedule.drive import House, options, random_options, random_request, request
from tests.schedule.scripted import ConstrainedHouse, Script


def constrained(asked: Request, script: Script) -> Request:
    return replace(asked, constraint=script.constraint())


def random_script(rng: random.Random) -> Script:
    return Script(
        seed=rng.randrange(10**6),
        length=rng.choice([1, 2, 5, 10, 40]),
        free=rng.choice([0, 0, 0, 1, 4]),
        delay=rng.choice([0, 0, 1, 7]),
        fails_to_start=rng.random() < 0.05,
        fails_at=rng.choice([None, None, None, None, 0, 3]),
    )


def random_mixed(rng: random.Random, opts: SchedulerOptions, num_blocks: int) -> Request:
    asked = random_request(rng, opts, num_blocks)
    return constrained(asked, random_script(rng)) if rng.random() < 0.6 else asked


@settings(max_examples=500, deadline=None, suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32 - 1), depth=st.integers(1, 3))
def test_any_mixture_in_any_order(seed: int, depth: int) -> None:
    """500 random schedules: preempted, chunked, cached, overlapped, aborted; every answer is that of a run alone, every
    mask was made with every token before it, and nothing is left behind."""
    rng = random.Random(seed)
    opts = random_options(rng)
    house = ConstrainedHouse(opts, rng.choice([6, 12, 24]), depth=depth)
    house.gives_columns = rng.random() < 0.5
    for _ in range(rng.randrange(1, 12)):
        house.add(random_mixed(rng, opts, house.num_blocks))
        for _ in range(rng.randrange(0, 5)):
            house.launch() if len(house.launched) < depth else house.read()
        if rng.random() < 0.1:
            request_id, index = rng.choice(list(house.heard))
            house.abort(request_id, rng.choice([None, index]))
        if rng.random() < 0.05:
            house.scheduler.reset_prefix_cache(reset_running=rng.random() < 0.5)
            house.check()
    house.run()
    house.check_answers()
    house.check_idle()
    assert house.scheduler._constraints._num_live == 0


def test_others_go_on_while_a_matcher_is_made() -> None:
    """E18: a grammar that takes long holds its own sequence back and nobody else, also those that arrived later."""
    house = ConstrainedHouse(options(), 24, depth=2)
    slow = house.add(constrained(request(5, max_tokens=4), Script(1, 9, delay=99)))
    others = [house.add(request(5, max_tokens=6, ignore_eos=True)) for _ in range(3)]
    for _ in range(24):
        house.launch()
        house.read()
    assert all(house.heard[other.request_id, 0].end for other in others)
    assert not house.heard[slow.request_id, 0].outputs
    house.run()
    house.check_answers()


def test_unconstrained_sequences_keep_overlapping() -> None:
    """Beside a constrained one, which is in every second step, a free one is in every step and fed unseen tokens."""
    house = ConstrainedHouse(options(), 40, depth=2)
    bound = house.add(constrained(request(3, max_tokens=12, ignore_eos=True), Script(1, 50)))
    free = house.add(request(3, max_tokens=24, ignore_eos=True))
    house.run()
    house.check_answers()
    decodes = [step for step in house.steps if all(s.num_new_tokens == 1 for s in step.sequences)]
    assert sum(any(s.feeds_last_sample for s in step.sequences) for step in decodes) >= 20
    both = sum(len(step.sequences) == 2 for step in house.steps)
    assert both == 12 and len(house.heard[bound.request_id, 0].token_ids) == 12
    assert len(house.steps) <= 26 and len(house.heard[free.request_id, 0].token_ids) == 24


def test_only_constrained_ones_wait_for_nothing_else() -> None:
    """With nobody else to run there is one step per token, and none is empty."""
    house = ConstrainedHouse(options(), 40, depth=2)
    for i in range(4):
        house.add(constrained(request(3, max_tokens=10, ignore_eos=True), Script(i, 50)))
    house.run()
    house.check_answers()
    assert len(house.steps) == 10


def test_a_finished_grammar_ends_the_sequence_at_once() -> None:
    """STOP with the token that completes it: no further step, also where eos is ignored and min_tokens is not reached,
    and also with the last token that `max_tokens` allows."""
    for params in ({}, {"ignore_eos": True}, {"min_tokens": 6}, {"max_tokens": 3}):
        house = ConstrainedHouse(options(), 24)
        asked = house.add(constrained(request(3, eos=[], **params), Script(4, 3)))
        house.run()
        heard = house.heard[asked.request_id, 0]
        assert len(heard.token_ids) == 3 and heard.end and heard.end.finish_reason is FinishReason.STOP
        assert heard.end.stop_reason is None and len(house.steps) == 3


def test_errors_end_one_sequence_only() -> None:
    """A grammar that cannot be made, and one that cannot go on: each ends its own sequence with its reason."""
    house = ConstrainedHouse(options(), 40, depth=2)
    unmade = house.add(constrained(request(3), Script(1, 5, fails_to_start=True)))
    broken = house.add(constrained(request(3, ignore_eos=True, max_tokens=9), Script(2, 50, fails_at=2)))
    well = house.add(constrained(request(3, ignore_eos=True, max_tokens=9), Script(3, 50)))
    house.run()
    house.check_answers()
    assert house.heard[unmade.request_id, 0].outputs[0].error == "the constraint cannot be enforced: no such grammar"
    assert house.heard[broken.request_id, 0].outputs[-1].error == "the script ends here"
    assert len(house.heard[broken.request_id, 0].token_ids) == 2
    assert house.heard[well.request_id, 0].outputs[-1].error is None


def test_each_choice_has_its_own_matcher() -> None:
    """n > 1: choices part, and each follows its own path; the prompt is still shared."""
    house = ConstrainedHouse(options(), 40, depth=2)
    asked = house.add(
        constrained(request(9, n=4, temperature=1.0, seed=3, max_tokens=10, ignore_eos=True), Script(5, 10, delay=2))
    )
    house.run()
    house.check_answers()
    assert len(house.enforcer.beginnings) == 4
    assert len({tuple(house.heard[asked.request_id, i].token_ids) for i in range(4)}) > 1


@pytest.mark.parametrize("when", ["held", "deferred", "running", "preempted"])
def test_abort_lets_go_of_the_matcher(when: str) -> None:
    """In whatever state it is; a matcher that is still being made is cancelled."""
    house = ConstrainedHouse(options(), 24)
    delay = 50 if when == "held" else 0
    n = 3 if when == "deferred" else 1
    asked = house.add(
        constrained(request(20, n=n, temperature=1.0, max_tokens=40, ignore_eos=True), Script(1, 99, delay=delay))
    )
    house.launch()
    live = list(house.scheduler._requests[asked.request_id].live.values())
    if when == "preempted":
        house.read()
        house.scheduler.reset_prefix_cache(reset_running=True)
        assert live[0].matcher is not None and live[0].slot is None
    house.abort(asked.request_id)
    while house.launched:
        house.read()
    assert all(s.matcher is None for s in live) and house.scheduler._constraints._num_live == 0
    assert all(b.is_cancelled for b in house.enforcer.beginnings) == (when == "held")
    house.check_idle()


def test_without_an_enforcer_constraints_are_refused() -> None:
    house = House(options(), 24)
    with pytest.raises(ValidationError, match="structured_outputs: this engine runs without a tokenizer"):
        house.scheduler.add(constrained(request(3), Script(1, 2)))
    assert not house.scheduler.has_work


def test_several_tokens_of_a_step_are_matched_in_order() -> None:
    """B119's seam: where a step gives several tokens, each advances the matcher, and what follows the end is dropped."""
    house = ConstrainedHouse(options(), 24)
    script = Script(1, 3, free=9)
    asked = house.add(constrained(request(3, ignore_eos=True), script))
    step = house.launch()
    assert step is not None
    sequence = house.scheduler._requests[asked.request_id].live[0]
    matcher = sequence.matcher
    result = StepResult(step.step_id, [SampledTokens(step.sequences[0].slot, [7, 8, 9, 10])])
    outputs = house.scheduler.update(step, result, 1.0)
    assert outputs[0].token_ids == [7, 8, 9] and outputs[0].finish_reason is FinishReason.STOP
    assert matcher is not None and matcher.output == (7, 8, 9)  # type: ignore[attr-defined]
