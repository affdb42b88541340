"""Abort in every state: nothing of the request is left, and nobody else notices."""

from __future__ import annotations

import random

import pytest

from samovar.core.sequence import FinishReason
from tests.schedule.drive import House, options, random_options, random_request, request


def test_aborts_at_random_moments_leave_nothing() -> None:
    """B086, B088: 2,000 requests aborted at random moments, whole or by choice, on odd settings."""
    num_aborts = 0
    for seed in range(20):
        rng = random.Random(seed)
        opts = random_options(rng)
        house = House(opts, rng.choice([12, 30, 60]), depth=2)
        for i in range(100):
            house.add(random_request(rng, opts, house.num_blocks))
            for _ in range(rng.randrange(4)):
                house.launch() if len(house.launched) < 2 else house.read()
            for _ in range(2):
                request_id, index = rng.choice(list(house.heard)[-8:])
                house.abort(request_id, rng.choice([None, index]))
                num_aborts += 1
            if i % 25 == 0:
                house.check_published()
        house.run()
        house.check_answers()
        house.check_published()
        house.check_idle()
    assert num_aborts == 4000


@pytest.mark.parametrize(
    "moment", ["waiting", "prefill", "prefill in flight", "decode", "decode in flight", "preempted"]
)
def test_everything_is_free_on_return(moment: str) -> None:
    """B086: blocks and slot are free when `abort` returns, whatever the state; the neighbour's answer is unchanged."""
    house = House(options(max_num_seqs=2, scheduling_policy="priority", max_num_batched_tokens=12), 40, depth=2)
    neighbour = house.add(request(5, max_tokens=30, ignore_eos=True, priority=-1))
    if moment == "waiting":
        house.add(request(5, max_tokens=30, ignore_eos=True, priority=-1))
    asked = house.add(request(40, max_tokens=30, ignore_eos=True, priority=1))
    house.launch()
    house.read()
    if "decode" in moment or moment == "preempted":
        for _ in range(6):
            house.launch()
            house.read()
    if "in flight" in moment:
        house.launch()
    if moment == "preempted":
        house.launch()
        house.add(request(5, max_tokens=30, ignore_eos=True))
        house.launch()
        assert house.scheduler.stats().num_preemptions == 1
    [last] = house.abort(asked.request_id)
    assert (last.finish_reason, last.token_ids) == (FinishReason.ABORT, [])
    assert last.timing is not None and last.timing.arrival == asked.arrival
    running = house.scheduler._running
    assert house.scheduler.block_usage()["used"] == len({b for s in running for b in s.block_table})
    assert all(s.request is not asked for s in running)
    assert house.abort(asked.request_id) == [] and house.abort("never seen") == []
    house.run()
    house.check_answers()
    house.check_idle()
    assert len(house.heard[neighbour.request_id, 0].token_ids) == 30


def test_queued_requests_of_gone_clients_never_run() -> None:
    """B089: five queued requests aborted behind a running one; the engine is idle right after that one."""
    house = House(options(max_num_seqs=1), 40, depth=2)
    house.add(request(6, max_tokens=20, ignore_eos=True))
    house.launch()
    gone = [house.add(request(6)) for _ in range(5)]
    for asked in gone:
        house.abort(asked.request_id)
    assert house.scheduler.stats().num_waiting == 0
    house.run()
    assert sum(len(step.started) for step in house.steps) == 1
    assert len(house.steps) <= 21


def test_cancelling_a_queued_request_leaves_the_running_one_alone() -> None:
    """B091: A decodes, B waits, B goes: A's tokens are those of a run alone."""
    for depth in (1, 2):
        house = House(options(max_num_seqs=1), 40, depth=depth)
        a = house.add(request(6, max_tokens=30, ignore_eos=True))
        for _ in range(5):
            house.launch()
            house.read()
        b = house.add(request(6))
        house.abort(b.request_id)
        house.run()
        assert len(house.heard[a.request_id, 0].token_ids) == 30
        house.check_answers()


def test_slot_and_blocks_are_reused_while_the_old_step_runs() -> None:
    """An abort with two steps in flight: the next request gets the slot at once, and reads only what it wrote."""
    house = House(options(max_num_seqs=1), 6, depth=3)
    old = house.add(request(18, max_tokens=6, ignore_eos=True))
    house.launch()
    house.launch()
    house.abort(old.request_id)
    new = house.add(request(20, max_tokens=4, ignore_eos=True))
    step = house.launch()
    assert step is not None and step.freed_slots == [s.slot for s in step.started] == [0]
    house.run()
    assert len(house.heard[new.request_id, 0].token_ids) == 4
    house.check_answers()
    house.check_published()


def test_one_choice_ends_and_the_others_go_on() -> None:
    """A stop string ends one choice: `abort(id, index)` frees that one alone, in every state of its siblings."""
    for num_steps in range(8):
        for index in range(3):
            house = House(options(max_num_batched_tokens=8), 60, depth=2)
            asked = house.add(request(20, n=3, temperature=1.0, seed=4, max_tokens=12, ignore_eos=True))
            for _ in range(num_steps):
                house.launch()
                house.read()
            assert len(house.abort(asked.request_id, index)) == 1
            house.run()
            house.check_answers()
            house.check_idle()
            for other in {0, 1, 2} - {index}:
                assert len(house.heard[asked.request_id, other].token_ids) == 12


def test_an_abort_between_two_results_discards_the_tokens() -> None:
    """No news comes after the end, although a launched step still computes for the sequence (B092's kind)."""
    house = House(options(), 40, depth=2)
    asked = house.add(request(6, max_tokens=30, ignore_eos=True))
    for _ in range(4):
        house.launch()
        house.read()
    house.launch()
    house.launch()
    before = len(house.heard[asked.request_id, 0].token_ids)
    house.abort(asked.request_id)
    house.read()
    house.read()
    assert len(house.heard[asked.request_id, 0].token_ids) == before
    assert not house.scheduler.has_work
    house.check_idle()
