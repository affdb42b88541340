"""Prefix keys are complete, digests are chained, and hits are those a plain dictionary would give."""

from __future__ import annotations

import random
from dataclasses import fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.schedule.block_pool import BlockPool
from samovar.schedule.prefix_cache import CacheIdentity, PrefixCache, PrefixKey
from tests.schedule.drive import House, options, request

KEY = PrefixKey(identity=CacheIdentity(model="m", weights_version="1", kv_dtype="bfloat16"), block_size=4)


def hit(house: House, prompt: list[int], salt: str | None = None, **params: object) -> int:
    """Run one request; how much of its prompt came from the cache."""
    asked = house.add(request(prompt, salt=salt, **params))
    house.run()
    return house.heard[asked.request_id, 0].outputs[-1].num_cached_tokens


def test_every_field_of_the_key_separates() -> None:
    """B094, B097: adapter load, salt, model, weights version, cache type...: another value is another chain."""
    others = [replace(KEY, identity=replace(KEY.identity, **{f.name: "other"})) for f in fields(CacheIdentity)] + [
        replace(KEY, block_size=8),
        replace(KEY, generation=1),
        replace(KEY, adapter_load_id=1),
        replace(KEY, adapter_load_id=2),
        replace(KEY, cache_salt="a"),
        replace(KEY, cache_salt="b"),
        replace(KEY, cache_salt=""),
        replace(KEY, cache_salt="None"),
        replace(KEY, private=1),
        replace(KEY, private=2),
        replace(KEY, cache_salt="\ud800"),  # A lone surrogate is possible in JSON.
    ]
    assert len(fields(PrefixKey)) == 6, "a new field needs a line above"
    digests = [KEY.digest(), *(key.digest() for key in others)]
    assert len(set(digests)) == len(digests) and len(digests[0]) == 32
    assert replace(KEY).digest() == KEY.digest()


@given(st.text(max_size=8), st.text(max_size=8), st.text(max_size=8), st.text(max_size=8))
def test_fields_cannot_run_into_each_other(a: str, b: str, c: str, d: str) -> None:
    """Length prefixes: moving characters from one field to the next changes the digest."""
    one = PrefixKey(identity=CacheIdentity(model=a, weights_version=b), block_size=4, cache_salt=a)
    other = PrefixKey(identity=CacheIdentity(model=c, weights_version=d), block_size=4, cache_salt=c)
    assert (one.digest() == other.digest()) == (one == other)


def test_media_are_named_by_their_whole_digest_and_place() -> None:
    """B095, B104: digests equal in their last bytes, or the same image elsewhere, give other blocks."""
    cache = PrefixCache(BlockPool(4), 4)
    root, tokens = KEY.digest(), [9, 9, 9, 9]
    image = bytes(range(32))
    near = bytes([255]) + image[1:]
    named = [
        cache.block_digest(root, tokens, media)
        for media in (
            [],
            [(0, image)],
            [(0, near)],
            [(1, image)],
            [(0, image), (1, image)],
            [(0, image[:16]), (0, image[16:])],
        )
    ]
    assert len(set(named)) == len(named)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_hits_are_those_of_a_dictionary(seed: int) -> None:
    """Prompts from a small alphabet: a block matches exactly when its whole history and key were published."""
    rng = random.Random(seed)
    pool = BlockPool(400)
    cache = PrefixCache(pool, 2)
    roots = [replace(KEY, cache_salt=s).digest() for s in (None, "a")]
    known: dict[tuple[bytes, tuple[int, ...]], int] = {}
    for _ in range(40):
        root = rng.choice(roots)
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 12))]
        digests: list[bytes] = []
        found = cache.match(digests, root, tokens)
        expected = []
        for end in range(2, len(tokens), 2):  # At least one token is left to compute.
            block = known.get((root, tuple(tokens[:end])))
            if block is None:
                break
            expected.append(block)
        assert found == expected and len(digests) <= len(found) + 1
        cache.extend(digests, root, tokens, len(tokens) // 2)
        whole: list[bytes] = []
        cache.extend(whole, root, tokens, len(tokens) // 2)
        assert digests == whole, "digests depend on how they were computed"
        table = pool.allocate(len(digests))
        cache.publish(table, digests)
        for i, block in enumerate(table):
            known.setdefault((root, tuple(tokens[: 2 * i + 2])), block)


def test_digests_are_computed_once() -> None:
    """Decoding 60 tokens names each block once: the whole prompt is never hashed again."""
    house = House(options(), 40)
    cache = house.scheduler._cache
    calls = []
    original = cache.block_digest
    cache.block_digest = lambda *a, **k: (calls.append(a), original(*a, **k))[1]  # type: ignore[method-assign]
    house.add(request(33, max_tokens=60, ignore_eos=True))
    house.run()
    assert len(calls) == 92 // 4


def test_the_longest_beginning_is_found_but_never_all() -> None:
    """At least one token is computed, or there would be no logits to sample from."""
    house = House(options(), 40)
    prompt = [5, 6, 7, 8, 9, 10, 11, 12]
    assert hit(house, prompt) == 0
    assert hit(house, prompt) == 4
    assert hit(house, [*prompt, 13]) == 8
    assert hit(house, [*prompt[:6], 30, 31, 32]) == 4
    assert hit(house, [1, *prompt]) == 0
    house.check_answers()
    stats = house.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (8 + 8 + 9 + 9 + 9, 4 + 8 + 4)


def test_output_is_found_by_the_next_turn() -> None:
    """The second turn of a conversation hits prompt and answer of the first."""
    house = House(options(), 40, depth=2)
    first = house.add(request(10, max_tokens=15, ignore_eos=True))
    house.run()
    turn = first.prompt_token_ids + house.heard[first.request_id, 0].token_ids + [20, 21]
    # The last sampled token of turn one was never computed: 24 of 25 tokens are there.
    assert hit(house, turn) == 24
    house.check_answers()


def test_salts_never_meet() -> None:
    """B097: the same prompt under another salt, or none, hits nothing; under the same one it does."""
    house = House(options(), 60)
    prompt = list(range(2, 20))
    hits = [hit(house, prompt, salt) for salt in ("a", "b", None, "a", "b", None)]
    assert hits == [0, 0, 0, 16, 16, 16]


def test_who_does_not_read_still_writes() -> None:
    """Requests that skip the cache compute all, and leave their blocks to others; caching off leaves nothing."""
    prompt = list(range(2, 20))
    house = House(options(), 60)
    assert [hit(house, prompt, skip_reading_prefix_cache=True) for _ in range(2)] == [0, 0]
    assert hit(house, prompt) == 16
    assert hit(house, prompt, prompt_logprobs=1) == 0
    stats = house.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 16), "only those that read are counted"
    house = House(options(enable_prefix_caching=False), 60)
    assert [hit(house, prompt) for _ in range(2)] == [0, 0]
    assert hit(house, prompt, n=2, temperature=1.0) == 0
    assert house.scheduler.stats().prefix_cache_queries == 0
    house = House(options(enable_prefix_caching=False), 60)
    hit(house, prompt)
    assert house.scheduler.block_usage()["published"] == 0


def test_prompt_logprobs_twice_are_the_same() -> None:
    """B101: echo (prompt logprobs, no tokens) repeated, with and without permission to read the cache."""
    house = House(options(), 60, depth=2)
    prompt = list(range(2, 33))
    answers = []
    for skip in (None, False, None, False):
        asked = house.add(request(prompt, max_tokens=0, prompt_logprobs=1, skip_reading_prefix_cache=skip))
        house.run()
        heard = house.heard[asked.request_id, 0]
        assert heard.end and heard.end.finish_reason == "length" and heard.token_ids == []
        answers.append(heard.end.prompt_logprobs)
    assert all(a == answers[0] for a in answers) and len(answers[0] or []) == len(prompt)
    house.check_answers()


def test_reset_forgets_and_never_finds_older_work() -> None:
    """What a request from before the reset publishes afterwards belongs to the old weights: nobody finds it."""
    house = House(options(), 60)
    prompt = list(range(2, 20))
    old = house.add(request(prompt, max_tokens=30, ignore_eos=True))
    house.launch()  # All of its blocks are published after the reset.
    assert house.scheduler.reset_prefix_cache() is True
    house.run()
    assert len(house.heard[old.request_id, 0].token_ids) == 30
    assert hit(house, prompt) == 0
    assert hit(house, prompt) == 16
    house.check_answers()


def test_failed_rows_publish_nothing() -> None:
    """B103: blocks of a row that failed, or of a step that failed, are never found."""
    for whole_step in (False, True):
        house = House(options(), 60)
        prompt = list(range(2, 20))
        house.add(request(prompt))
        house.launch()
        house.worker.fail_rate = 1.0
        house.fail_step() if whole_step else house.read()
        house.worker.fail_rate = 0.0
        assert house.scheduler.block_usage()["published"] == 0
        assert hit(house, prompt) == 0
        house.check_answers()


def test_a_chunk_in_flight_at_preemption_publishes_nothing() -> None:
    """B103 as reported: preempted while its chunk is in flight, its blocks already belong to somebody else."""
    house = House(options(scheduling_policy="priority", max_num_seqs=1, max_num_batched_tokens=13), 24, depth=2)
    low = house.add(request(50, priority=5))
    house.launch()
    house.add(request(20, priority=0, max_tokens=20, ignore_eos=True))
    house.launch()  # Takes the slot and the blocks of the other.
    house.read()  # The chunk of the preempted one comes back.
    assert house.scheduler.block_usage()["published"] == 0
    house.run()
    house.check_answers()
    house.check_published()
    assert house.heard[low.request_id, 0].outputs[-1].timing.num_preemptions == 1  # type: ignore[union-attr]
