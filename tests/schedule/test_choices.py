"""n > 1: choices share the prompt's blocks, whatever the cache settings, and are counted once."""

from __future__ import annotations

import pytest

from samovar.schedule.live import sampling_key
from tests.schedule.drive import House, options, request


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("skip", [None, True])
@pytest.mark.parametrize("cached_before", [False, True])
def test_prompt_blocks_are_held_once(caching: bool, skip: bool | None, cached_before: bool) -> None:
    """E19: 8 choices of a 41-token prompt hold its 10 full blocks once, and compute its tokens once."""
    house = House(options(enable_prefix_caching=caching, max_num_seqs=8, max_num_batched_tokens=48), 60, depth=2)
    prompt = [2 + k % 37 for k in range(41)]
    if cached_before:
        house.add(request(prompt, max_tokens=1))
        house.run()
    before = house.worker.num_computed
    asked = house.add(
        request(prompt, n=8, temperature=1.0, seed=3, max_tokens=3, ignore_eos=True, skip_reading_prefix_cache=skip)
    )
    most = 0
    for _ in range(50):
        house.launch()
        house.read()
        most = max(most, house.scheduler.block_usage()["used"])
    # 10 shared blocks, and the rest of each choice (41 + 3 tokens) in one of its own.
    assert most == 10 + 8
    reads = caching and not skip and cached_before
    shared_tail = 8 * (1 + 2)
    assert house.worker.num_computed - before == (0 if reads else 40) + shared_tail
    cached = {house.heard[asked.request_id, i].outputs[-1].num_cached_tokens for i in range(8)}
    assert cached == {40 if reads else 0}, "choices must not report each other's blocks as cached"
    house.check_answers()
    house.check_idle()


def test_a_request_that_skips_the_cache_shares_with_nobody_else() -> None:
    """Its choices share under a key of its own, and leave nothing that others could find."""
    house = House(options(), 60)
    prompt = [2 + k % 37 for k in range(41)]
    for _ in range(2):
        house.add(request(prompt, n=3, temperature=1.0, seed=3, max_tokens=2, skip_reading_prefix_cache=True))
        house.run()
    plain = house.add(request(prompt, max_tokens=2))
    house.run()
    assert house.heard[plain.request_id, 0].outputs[-1].num_cached_tokens == 0
    assert house.scheduler.stats().prefix_cache_hits == 0


def test_counted_once() -> None:
    """E19: prompt tokens and cache lookups count per request, generated tokens per choice."""
    house = House(options(), 60)
    house.add(request(20, n=4, temperature=1.0, seed=1, max_tokens=5, ignore_eos=True))
    assert house.scheduler.stats().num_waiting == 4
    house.run()
    stats = house.scheduler.stats()
    assert (stats.prompt_tokens, stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 20, 0)
    assert stats.generation_tokens == 20 and stats.num_waiting == stats.num_running == 0


def test_siblings_wait_for_the_prompt() -> None:
    """While choice 0 computes the prompt in chunks, the others compute nothing."""
    house = House(options(max_num_batched_tokens=8), 60)
    house.add(request(40, n=3, temperature=1.0, seed=1))
    for _ in range(5):
        step = house.launch()
        assert step is not None and len(step.sequences) == 1
        house.read()
    step = house.launch()
    # Two siblings with 4 tokens each after 36 shared ones, beside the leader's one; 8 tokens in all.
    assert step is not None and [s.num_new_tokens for s in step.sequences] == [1, 4, 3]
    house.run()
    house.check_answers()


def test_keys_depend_on_seed_and_choice_only() -> None:
    """A seeded request has the same keys in any engine; choices, and requests without a seed, have keys of their own."""
    keys = {(seed, i): sampling_key(seed, i) for seed in (-(2**63), -5, 0, 1, 2**63 - 1) for i in range(4)}
    assert len(set(keys.values())) == len(keys) and all(0 <= k < 2**64 for k in keys.values())
    assert all(sampling_key(seed, i) == k for (seed, i), k in keys.items())
    assert len({sampling_key(None, 0) for _ in range(100)}) == 100


def test_an_unseeded_key_survives_preemption() -> None:
    """A resumed sequence goes on with the key it had, so that its draws are those it would have made."""
    house = House(options(max_num_seqs=4), 16)
    for _ in range(4):
        house.add(request(4, max_tokens=50, ignore_eos=True, temperature=1.0))
    house.run()
    assert house.scheduler.stats().num_preemptions > 0
    keys: dict[tuple[int, ...], set[int]] = {}
    for start in (s for step in house.steps for s in step.started):
        keys.setdefault(tuple(start.token_ids[: start.num_prompt_tokens]), set()).add(start.sampling_key)
    assert len(keys) == 4 and all(len(k) == 1 for k in keys.values())
