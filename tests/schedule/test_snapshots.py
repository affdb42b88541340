"""Snapshots of recurrent states: where chunks end for them, which rows they take, and when these are free again."""

from __future__ import annotations

import pytest

from samovar.schedule.options import SnapshotRules
from samovar.schedule.snapshots import SnapshotRows
from tests.schedule.drive import House, options, request

RULES = SnapshotRules(margin=5, least_gain=16, interval=40, decode_interval=8)


def house(num_blocks: int = 60, **changes: object) -> House:
    """Blocks of 4 tokens, rows for 6 snapshots."""
    return House(options(**{"num_snapshots": 6, "snapshot_rules": RULES, **changes}), num_blocks, depth=2)


def chunks(house: House) -> list[tuple[int, int]]:
    """(start, tokens) of every chunk of a prompt so far; each of one sequence."""
    return [(s.start, s.num_new_tokens) for step in house.steps for s in step.sequences if s.num_new_tokens > 1]


def saves(house: House) -> list[int]:
    """Tokens behind every snapshot so far, by the step that makes it."""
    found = []
    for step in house.steps:
        ends = {s.slot: s.start + s.num_new_tokens for s in step.sequences}
        found += [ends[slot] for slot, _ in step.state_saves]
    return found


@pytest.mark.parametrize(
    ("length", "cut", "saved"),
    [
        (20, [(0, 20)], []),  # 12 tokens are not worth a step
        (21, [(0, 16), (16, 5)], [16]),
        (23, [(0, 16), (16, 7)], [16]),
        (90, [(0, 64), (64, 20), (84, 6)], [64, 84]),  # a whole step is longer than `interval`
    ],
)
def test_chunks_end_for_what_is_worth_it(length: int, cut: list[tuple[int, int]], saved: list[int]) -> None:
    """One step more, where `margin` tokens are left; on the way no step more."""
    fresh = house(max_num_batched_tokens=64)
    fresh.add(request(length, max_tokens=1))
    fresh.run()
    assert (chunks(fresh), saves(fresh)) == (cut, saved)
    fresh.check_states()


def test_odd_chunks_end_on_a_border_after_the_interval() -> None:
    """Steps of 27 tokens: the second comes to 54, and ends at 52 for a snapshot."""
    fresh = house(max_num_batched_tokens=27)
    fresh.add(request(90, max_tokens=1))
    fresh.run()
    assert chunks(fresh) == [(0, 27), (27, 25), (52, 27), (79, 5), (84, 6)] and saves(fresh) == [52, 84]


def test_nothing_is_cut_without_need() -> None:
    """Without rows, without a prefix cache, without chunks: prompts as they would be computed otherwise."""
    for changes in ({"num_snapshots": 0}, {"enable_prefix_caching": False}, {"enable_chunked_prefill": False}):
        plain = house(max_num_batched_tokens=96, **changes)
        plain.add(request(90, max_tokens=1))
        plain.run()
        assert (chunks(plain), saves(plain)) == ([(0, 90)], [])
    again = house(max_num_batched_tokens=96)
    for _ in range(2):
        again.add(request(list(range(2, 36)), max_tokens=1))
        again.run()
    assert chunks(again) == [(0, 28), (28, 6), (28, 6)] and saves(again) == [28]


def test_the_latest_state_of_who_decodes_is_kept() -> None:
    """One row for each of those that may have one; it stays behind when the sequence ends, for the next turn."""
    rolling = house(max_num_seqs=4)
    asked = [rolling.add(request(3, max_tokens=24, ignore_eos=True)) for _ in range(4)]
    rolling.run()
    # 6 rows, half of them for sequences that decode: the fourth has none.
    assert sorted(saves(rolling)) == sorted([8, 16, 24] * 3)
    snapshots = rolling.scheduler._snapshots
    assert snapshots is not None and (snapshots.rows.num_held, snapshots.rows.num_free) == (3, 3)
    first = rolling.heard[asked[0].request_id, 0].token_ids
    turn = rolling.add(request(asked[0].prompt_token_ids + first + [5, 6], max_tokens=2, ignore_eos=True))
    rolling.run()
    assert rolling.heard[turn.request_id, 0].outputs[0].num_cached_tokens == 24
    rolling.check_answers()


def test_a_reset_frees_every_row() -> None:
    """And what a launched step saves under the old name is found by nobody."""
    fresh = house()
    prompt = list(range(2, 32))
    fresh.add(request(prompt, max_tokens=4, ignore_eos=True))
    fresh.launch()
    fresh.scheduler.reset_prefix_cache()
    fresh.run()
    second = fresh.add(request(prompt, max_tokens=4, ignore_eos=True))
    fresh.run()
    assert fresh.heard[second.request_id, 0].outputs[0].num_cached_tokens == 0
    fresh.scheduler.reset_prefix_cache()
    snapshots = fresh.scheduler._snapshots
    assert snapshots is not None and (snapshots.rows.num_held, snapshots.rows.num_free) == (0, 6)


def test_who_leaves_before_its_first_step_lets_go() -> None:
    """A sequence that displaced another and found no room in the step holds its snapshot until it leaves."""
    opts = {"max_num_seqs": 16, "max_num_batched_tokens": 40, "max_model_len": 40, "enable_chunked_prefill": False}
    fresh = house(100, scheduling_policy="priority", **opts)
    before = fresh.add(request(4, max_tokens=6, ignore_eos=True))
    fresh.run()
    known = before.prompt_token_ids + fresh.heard[before.request_id, 0].token_ids
    for _ in range(14):
        fresh.add(request(2, max_tokens=30, ignore_eos=True, priority=5))
    for _ in range(3):
        fresh.launch()
        fresh.read()
    urgent = fresh.add(request(known[:8] + [9] * 30, max_tokens=2, priority=-5))
    fresh.launch()
    waiting = fresh.scheduler._requests[urgent.request_id].live[0]
    assert waiting.restored is not None and not waiting.is_started
    fresh.abort(urgent.request_id)  # `check` counts what is held
    assert waiting.restored is None
    fresh.run()
    fresh.check_answers()


def test_rows_are_taken_from_who_was_not_used_for_longest() -> None:
    """Not from those that somebody is about to begin from; with none left there is no snapshot."""
    rows = SnapshotRows(10, 2)
    first, second = rows.reserve(), rows.reserve()
    assert (first, second, rows.reserve()) == (10, 11, None)
    assert first is not None and second is not None
    rows.publish(first, b"one")
    rows.publish(second, b"two")
    held = rows.pin(b"one")
    assert rows.reserve() == 11 and b"two" not in rows
    assert rows.publish(11, b"one") is None and rows.num_free == 1
    rows.drop(held)
    assert rows.num_free == 1 and b"one" not in rows
    rows.unpin(held)
    assert rows.num_free == 2
