"""Steps of several rounds: taken where nobody waits and nobody must be looked at, and booked as that many steps."""

from __future__ import annotations

import pytest

from samovar.core.sequence import FinishReason
from samovar.core.step import FED, DecodeSequences, SampledTokens, ScheduledStep, StepResult
from samovar.schedule.rounds import MOST_ROUNDS
from tests.schedule.drive import House, options, request
from tests.schedule.fake_worker import reference

SECONDS = 1.0
"""More than the fake worker's rounds ever take."""


def house(num_blocks: int = 60, **changes: object) -> House:
    return House(options(**{"rounds_seconds": SECONDS, **changes}), num_blocks, depth=2)


def begin(of: House, *lengths: int, **params: object) -> ScheduledStep:
    """Requests with prompts so long, computed; the step after their first tokens."""
    for length in lengths:
        of.add(request(length, ignore_eos=True, **params))
    while not of.steps or not isinstance(of.steps[-1].sequences, DecodeSequences):
        of.launch()
        of.read()
    of.launch()
    return of.steps[-1]


@pytest.mark.parametrize("depth", [1, 2])
def test_a_stream_runs_ahead(depth: int) -> None:
    of = House(options(rounds_seconds=SECONDS), 60, depth=depth)
    asked = of.add(request(6, max_tokens=30, ignore_eos=True))
    of.run()
    of.check_answers()
    of.check_published()
    of.check_idle()
    rounds = [step.num_rounds for step in of.steps]
    assert rounds.count(MOST_ROUNDS) >= 6 and len(rounds) < 14
    assert sum(rounds) <= 30 + 1, "no round is wasted on what max_tokens forbids"
    assert of.scheduler.stats().generation_tokens == 30
    assert len(of.heard[asked.request_id, 0].outputs) == len(rounds) - sum(not step.started for step in of.steps[:1])


def test_as_many_as_the_time_allows() -> None:
    """A round of one sequence takes 1.1 ms here, of three 1.3 ms."""
    assert begin(house(rounds_seconds=0.0035), 5).num_rounds == 3
    assert begin(house(rounds_seconds=0.0035), 5, 6, 7).num_rounds == 2
    assert begin(house(rounds_seconds=0.002), 5).num_rounds == 1
    assert begin(house(rounds_seconds=0.0), 5).num_rounds == 1


def test_one_behind_the_other() -> None:
    """The next step's first tokens are those that nobody has seen yet; it shrinks to what is left, and a newcomer's
    prompt goes behind what is launched, beside one round of the others."""
    of = house()
    step = begin(of, 5, 6, max_tokens=12)
    assert step.num_rounds == MOST_ROUNDS
    behind = of.launch()
    assert behind is not None and behind.num_rounds == MOST_ROUNDS and isinstance(behind.sequences, DecodeSequences)
    assert behind.sequences.token_ids == [FED, FED]
    of.read()
    newcomer = of.add(request(9))
    last = of.launch()
    assert last is not None and last.num_rounds == 1
    assert [start.num_prompt_tokens for start in last.started] == [9] and len(last.sequences) == 3
    of.run()
    of.check_answers()
    assert of.heard[newcomer.request_id, 0].end


def test_who_waits_is_not_kept_waiting() -> None:
    """With a queue that nobody can leave yet, too."""
    of = house(max_num_seqs=2)
    begin(of, 5, 6, max_tokens=12)
    of.add(request(4))
    of.read()
    step = of.launch()
    assert step is not None and step.num_rounds == 1
    of.run()
    of.check_answers()


def test_an_end_in_the_middle() -> None:
    """What is computed behind it is not told, not counted, not published; neighbours get all of theirs."""
    asked = request(6, max_tokens=20, seed=5, temperature=1.0, eos=[])
    alone = reference(asked, 0, 96).token_ids
    stop = next(token for at, token in enumerate(alone) if at >= 3 and token not in alone[:at])
    of = house()
    of.add(request(6, max_tokens=20, ignore_eos=True))
    ends = of.add(
        request(asked.prompt_token_ids, max_tokens=20, seed=5, temperature=1.0, eos=[], stop_token_ids=[stop])
    )
    of.run()
    of.check_answers()
    of.check_published()
    of.check_idle()
    end = of.heard[ends.request_id, 0].end
    assert end is not None and end.stop_reason == stop
    assert any(step.num_rounds > 1 for step in of.steps)
    assert of.scheduler.stats().generation_tokens == 20 + alone.index(stop) + 1


def test_a_row_that_fails_in_the_middle() -> None:
    """Its tokens up to there are told, then the error; a row without all its tokens has failed as well."""
    of = house()
    step = begin(of, 5, 6, 7, max_tokens=20)
    assert isinstance(step.sequences, DecodeSequences) and step.num_rounds == 4
    first, second, third = step.sequences.slots
    sampled = [SampledTokens(first, [9, 8]), SampledTokens(second, [7, 6, 5]), SampledTokens(third, [4, 3, 2, 1])]
    result = StepResult(step.step_id, sampled, failed={first: "broken"}, seconds=0.001)
    news = of.scheduler.update(step, result, 50.0)
    assert [output.token_ids for output in news] == [[9, 8], [], [7, 6, 5], [], [4, 3, 2, 1]]
    errors = [output.error for output in news]
    assert errors[1] == "broken" and "no token" in (errors[3] or "") and errors[0] is errors[4] is None
    assert news[1].finish_reason is news[3].finish_reason is FinishReason.ERROR
    assert of.scheduler.block_usage()["sequences"] == 1


def test_few_blocks_mean_one_round() -> None:
    """Nobody is preempted for the sake of rounds: blocks of one token, ten of them."""
    preemptions = []
    for seconds in (0.0, SECONDS):
        of = house(num_blocks=10, max_num_seqs=2, block_size=1, rounds_seconds=seconds)
        for _ in range(2):
            of.add(request(2, max_tokens=7, ignore_eos=True))
        of.run()
        of.check_answers()
        of.check_idle()
        preemptions.append(of.scheduler.stats().num_preemptions)
        # Four rounds of two sequences take eight blocks; they have four of the ten when both begin.
        assert of.steps[2].num_rounds == 1
    assert preemptions[0] == preemptions[1] > 0


@pytest.mark.parametrize("rules", [{"bad_words": ["x y"], "bad_words_token_ids": [[3, 4]]}, {"max_tokens": 2}])
def test_who_must_be_seen_first_or_is_nearly_done(rules: dict[str, object]) -> None:
    of = house()
    of.add(request(5, max_tokens=20, ignore_eos=True))
    of.add(request(5, ignore_eos=True, **{"max_tokens": 20, **rules}))
    of.run()
    of.check_answers()
    together = [step.num_rounds for step in of.steps if len(step.sequences) == 2]
    if "bad_words" in rules:
        assert set(together) == {1}
    assert max(step.num_rounds for step in of.steps) >= (1 if "bad_words" in rules else 4)


def test_a_step_that_fails_as_a_whole_and_an_abort() -> None:
    of = house()
    begin(of, 5, 6, max_tokens=30)
    of.abort(next(iter(of.requests)))
    of.fail_step()
    of.run()
    of.check_answers()
    of.check_idle()
