"""Order of admission and preemption: first come first served, priority, and no inversion."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.schedule.live import LiveRequest, make_sequences
from samovar.schedule.policy import WaitingQueue, fcfs, priority
from tests.schedule.drive import House, options, request


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_queue_agrees_with_a_sorted_list(seed: int) -> None:
    """Adds, takes from the front, removals from anywhere and returns to the old place."""
    rng = random.Random(seed)
    queue = WaitingQueue()
    inside, outside = [], []
    for order in range(60):
        asked = request(3, priority=rng.randrange(-2, 3))
        [sequence] = make_sequences(LiveRequest(asked, None, False), priority(asked, order), 10, overlaps=True)
        queue.add(sequence)
        inside.append(sequence)
        if outside and rng.random() < 0.3:
            back = outside.pop()
            queue.add(back)
            inside.append(back)
        inside.sort(key=lambda s: s.rank)
        assert queue.peek() is inside[0] and len(queue) == len(inside)
        if rng.random() < 0.4:
            outside.append(inside.pop(0))
            queue.remove(outside[-1])
        if inside and rng.random() < 0.4:
            queue.remove(inside.pop(rng.randrange(len(inside))))
        assert all(s in queue for s in inside) and len(queue._heap) <= 2 * len(inside) + 17


def test_queue_forgets_those_that_left() -> None:
    """B088's kind: requests that give up while they wait leave nothing in the heap, wherever they stood."""
    queue = WaitingQueue()
    sequences = []
    for order in range(1000):
        sequences += make_sequences(LiveRequest(request(1), None, False), (order,), 10, overlaps=True)
        queue.add(sequences[-1])
    for left, sequence in zip(range(999, 0, -1), sequences[:0:-1], strict=True):
        queue.remove(sequence)
        assert len(queue._heap) <= 2 * left + 17
    assert queue.peek() is sequences[0] and len(queue) == 1


def test_a_prompt_half_computed_goes_on_while_an_earlier_arrival_waits() -> None:
    """The first in the queue cannot start; those that run and rank behind it must not stop for that, or all would."""
    house = House(options(scheduling_policy="priority", max_num_seqs=2, max_num_batched_tokens=8), 20)
    early = request(60, max_tokens=2, ignore_eos=True)
    late = house.add(request(60, max_tokens=2, ignore_eos=True))
    house.launch()
    house.read()
    house.add(early)
    house.run(200)
    assert first_scheduled(house, late) < first_scheduled(house, early)
    assert house.scheduler.stats().num_preemptions == 0
    house.check_answers()


def test_ranks() -> None:
    """fcfs knows only the order of entry; priority puts lower values first, then earlier arrivals."""
    early, late = request(1, priority=1), request(1, priority=-1)
    assert fcfs(early, 0) < fcfs(late, 1)
    assert priority(late, 1) < priority(early, 0)
    assert priority(early, 9) < priority(request(1, priority=1), 0)


def first_scheduled(house: House, asked: object) -> float:
    heard = house.heard[asked.request_id, 0]  # type: ignore[attr-defined]
    assert heard.end and heard.end.timing
    return heard.end.timing.first_scheduled


def test_fcfs_starts_in_order_of_arrival() -> None:
    """Nobody overtakes, not even a prompt that would fit where the first in the queue does not."""
    house = House(options(max_num_seqs=2), 24)
    asked = [house.add(request(n, max_tokens=10, ignore_eos=True)) for n in (60, 20, 70, 3, 3)]
    house.run()
    starts = [first_scheduled(house, a) for a in asked]
    assert starts == sorted(starts)


def test_fcfs_preempts_the_newest() -> None:
    """When blocks run out, the newest gives up its own, returns to the front, and the oldest is never touched."""
    house = House(options(max_num_seqs=4, max_model_len=96), 16)
    asked = [house.add(request(4, max_tokens=50, ignore_eos=True)) for _ in range(4)]
    house.run()
    house.check_answers()
    counts = [house.heard[a.request_id, 0].end.timing.num_preemptions for a in asked]  # type: ignore[union-attr]
    assert counts[0] == 0 and counts[3] >= 1
    assert house.scheduler.stats().num_preemptions == sum(counts)


def test_urgent_request_takes_a_slot() -> None:
    """No inversion: all slots are held by less urgent ones, and the urgent one runs in the very next step."""
    house = House(options(scheduling_policy="priority", max_num_seqs=3), 60, depth=2)
    for _ in range(5):
        house.add(request(6, priority=3, max_tokens=40, ignore_eos=True))
    for _ in range(4):
        house.launch()
        house.read()
    urgent = house.add(request(6, priority=-10, max_tokens=5, ignore_eos=True))
    step = house.launch()
    assert step is not None and [s.num_prompt_tokens for s in step.started] == [6]
    house.run()
    assert first_scheduled(house, urgent) == 5.0
    house.check_answers()


def test_urgent_request_takes_blocks() -> None:
    """B083 as reported: several priority 0 requests fill the pool, then one with -10."""
    house = House(options(scheduling_policy="priority", block_size=16, max_model_len=384), 24, depth=2)
    for _ in range(4):
        house.add(request(80, max_tokens=30, ignore_eos=True))
    for _ in range(30):
        house.launch()
        house.read()
    urgent = house.add(request(200, priority=-10, max_tokens=30, ignore_eos=True))
    house.launch()
    house.run()
    assert first_scheduled(house, urgent) == 31.0
    house.check_answers()
    house.check_idle()


def test_urgent_request_goes_before_a_long_prefill() -> None:
    """The token budget knows priorities too: a less urgent prompt that is half computed waits."""
    house = House(options(scheduling_policy="priority", max_num_batched_tokens=8), 60)
    long = house.add(request(90, priority=1, max_tokens=1))
    house.launch()
    house.read()
    urgent = house.add(request(6, priority=0, max_tokens=1))
    house.run()
    ends = [house.heard[r.request_id, 0].end.timing.last_token for r in (long, urgent)]  # type: ignore[union-attr]
    assert ends[1] == 2.0 and ends[0] > 10
    assert house.heard[long.request_id, 0].end.timing.num_preemptions == 0  # type: ignore[union-attr]


def test_equal_priority_never_displaces() -> None:
    """An earlier arrival is no reason to preempt: those that run go on."""
    house = House(options(scheduling_policy="priority", max_num_seqs=1), 60)
    early = request(6, max_tokens=5)
    house.add(request(6, max_tokens=5))
    house.launch()
    house.add(early)
    house.run()
    assert house.scheduler.stats().num_preemptions == 0


def test_random_priorities() -> None:
    """B083: 100 requests with random priorities on a small pool all end with the answers they give alone."""
    rng = random.Random(3)
    house = House(options(scheduling_policy="priority", max_num_seqs=8, max_num_batched_tokens=32), 24, depth=2)
    for _ in range(100):
        house.add(request(rng.randrange(1, 60), priority=rng.randrange(-5, 6), max_tokens=30, ignore_eos=True))
        house.launch() if len(house.launched) < 2 else house.read()
    house.run()
    assert house.scheduler.stats().num_preemptions > 5
    house.check_answers()
    house.check_idle()
