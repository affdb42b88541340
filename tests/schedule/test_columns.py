"""Decode steps and their results as columns: the same news, at the same times, as from rows made one by one."""

from __future__ import annotations

import random
from dataclasses import asdict

import pytest

from samovar.core.sequence import FinishReason
from samovar.core.step import FED, DecodeSequences, PlainTokens, SampledTokens, ScheduledSequence, StepResult
from tests.schedule.drive import House, options, random_options, random_request, request


@pytest.fixture(autouse=True)
def same_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts come from a count of requests: these tests start it anew, and leave it as it was for others."""
    monkeypatch.setattr("tests.schedule.drive._serial", 0)


def heard(seed: int, *, gives_columns: bool) -> tuple[list[object], dict[str, int], object]:
    """Everything that is said of some random requests, some of them aborted, in a pool too small for all."""
    chosen = random.Random(seed)
    house = House(random_options(chosen), chosen.randrange(4, 30), depth=chosen.randrange(1, 3))
    house.gives_columns = gives_columns
    for turn in range(12):
        house.add(random_request(chosen, house.options, house.num_blocks))
        for _ in range(chosen.randrange(6)):
            while len(house.launched) < house.depth and house.launch() is not None:
                pass
            house.read()
        if turn % 5 == 4:
            house.abort(f"r{1 + chosen.randrange(turn)}")
    house.run()
    outputs = [asdict(output) for key in sorted(house.heard) for output in house.heard[key].outputs]
    return list(outputs), house.scheduler.block_usage(), house.scheduler.stats()


@pytest.mark.parametrize("seed", range(30))
def test_the_same_news(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens, ends, stamps, cached tokens, prompt logprobs, block usage and totals."""
    monkeypatch.setattr("samovar.schedule.live.secrets.randbits", lambda bits: 5)
    by_rows = heard(seed, gives_columns=False)
    monkeypatch.setattr("tests.schedule.drive._serial", 0)
    assert heard(seed, gives_columns=True) == by_rows


def test_a_slot_without_a_token_and_slots_in_another_order() -> None:
    """A result that does not name the step's slots in the step's order is matched by slot; who is left out has failed."""
    house = House(options(), depth=1)
    for name in ("a", "b", "c"):
        house.add(request(4, id=name, max_tokens=5, eos=[]))
    house.launch()
    house.read()
    step = house.launch()
    assert step is not None and isinstance(step.sequences, DecodeSequences) and len(step.sequences) == 3
    slots = step.sequences.slots
    given = PlainTokens([slots[2], slots[0]], [33, 31])
    news = {o.request_id: o for o in house.scheduler.update(step, StepResult(step.step_id, given), 9.0)}
    assert (news["a"].token_ids, news["c"].token_ids) == ([31], [33])
    assert news["b"].finish_reason is FinishReason.ERROR and "no token" in (news["b"].error or "")


def test_rows_of_columns() -> None:
    """Columns read like the lists they stand for."""
    columns = DecodeSequences([4, 2], [9, 17], [FED, 70], {1: [5]})
    rows = [
        ScheduledSequence(4, 8, 1, [], [], True, 9),
        ScheduledSequence(2, 16, 1, [70], [5], True, 17),
    ]
    assert list(columns) == rows == columns[:] and columns[-1] == rows[1] and len(columns) == 2
    assert columns[0].feeds_last_sample and not columns[1].feeds_last_sample and rows[1] in columns
    tokens = PlainTokens([4, 2], [1, 3])
    assert list(tokens) == [SampledTokens(4, [1]), SampledTokens(2, [3])] == tokens[0:] and tokens[1].slot == 2
