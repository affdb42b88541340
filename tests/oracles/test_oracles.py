"""Two ways to run the same requests must give the same answers: random requests (300 each under -m slow), on a tiny random Llama.

Rows of bugs.md covered whole here: B080 (preempted output incomplete), B083 (priority preemption), B103 (torn blocks),
B067 and B064 (neighbours change results), B071 (choices of n > 1), B101 (second call on a cached prefix).
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from samovar import LLM, SamplingParams
from tests.oracles.workload import VOCAB, Case, Expectation, run

MakeLLM = Callable[..., LLM]


def test_the_workload_is_varied(cases: list[Case], plain: Expectation) -> None:
    """The comparison below would prove nothing if every request ended alike."""
    reasons = {(c.finish_reason, type(c.stop_reason)) for output in plain.outputs for c in output.outputs}
    assert {("length", type(None)), ("stop", str), ("stop", int), ("stop", type(None))} <= reasons
    assert sum(c.finish_reason == "error" for output in plain.outputs for c in output.outputs) == 0
    tokens = {token for output in plain.outputs for c in output.outputs for token in c.token_ids}
    assert len(tokens) > 150


def test_batched_is_alone(make_llm: MakeLLM, cases: list[Case], plain: Expectation) -> None:
    """Neighbours, overlap and the prefix cache change nothing."""
    plain.check(run(make_llm(), cases))


def test_warm_is_cold(make_llm: MakeLLM, cases: list[Case], plain: Expectation) -> None:
    """B101: the second and third time most of the prompt comes from the cache; after a reset nothing does."""
    llm = make_llm()
    run(llm, cases)
    warm = run(llm, cases)
    plain.check(warm)
    assert sum(output.num_cached_tokens for output in warm) > 15 * len(cases)
    assert llm.reset_prefix_cache()
    lonely = cases[0]
    assert run(llm, [lonely])[0].num_cached_tokens == 0


@pytest.mark.parametrize("num_blocks", [24, 40])
def test_preempted_is_not(make_llm: MakeLLM, growing: list[Case], plain_growing: Expectation, num_blocks: int) -> None:
    """B080, B103: a pool in which three sequences fit at full length; they take each other's blocks all the time."""
    llm = make_llm(num_gpu_blocks_override=num_blocks, max_model_len=150, max_num_batched_tokens=96)
    plain_growing.check(run(llm, growing))
    assert llm._engine.stats().num_preemptions > len(growing) / 4
    assert llm._engine.call("block_usage")["used"] == 0


def test_priorities_change_order_only(make_llm: MakeLLM, growing: list[Case], plain_growing: Expectation) -> None:
    """B083: random priorities on a small pool: high ones displace running ones, and all finish with the same tokens."""
    options = {"num_gpu_blocks_override": 24, "max_model_len": 150, "max_num_batched_tokens": 96}
    llm = make_llm(**options, scheduling_policy="priority")
    rng = random.Random(3)
    priorities = [rng.randint(-10, 10) for _ in growing]
    prompts, params = [prompt for prompt, _ in growing], [params for _, params in growing]
    plain_growing.check(llm.generate(prompts, params, priority=priorities, use_tqdm=False))
    assert llm._engine.stats().num_preemptions > len(growing) / 4


@pytest.mark.parametrize("budget", [16, 37])
def test_chunked_is_whole(make_llm: MakeLLM, cases: list[Case], plain: Expectation, budget: int) -> None:
    """Prompts cut into small, odd chunks, mixed with decodes."""
    plain.check(run(make_llm(max_num_batched_tokens=budget, max_num_seqs=8), cases))


def test_unchunked_is_whole(make_llm: MakeLLM, cases: list[Case], plain: Expectation) -> None:
    """`enable_chunked_prefill` off."""
    plain.check(run(make_llm(enable_chunked_prefill=False, max_num_batched_tokens=320), cases))


@pytest.mark.parametrize("overlap", [True, False])
def test_overlap_is_not(make_llm: MakeLLM, cases: list[Case], plain: Expectation, overlap: bool) -> None:
    """Launching step n + 1 before n is read changes nothing; nor does another block size."""
    plain.check(run(make_llm(async_scheduling=overlap, max_num_seqs=5, block_size=8), cases))


def test_choices_are_their_own(make_llm: MakeLLM) -> None:
    """B071, B064: choice i of a seeded request depends on the seed and i, not on n or on unseeded neighbours."""
    llm = make_llm()
    cached = make_llm(enable_prefix_caching=False)
    prompt = [5, 6, 7] * 20
    params = SamplingParams(temperature=1.0, seed=42, max_tokens=20, ignore_eos=True)
    eight = llm.generate(prompt, params.clone(n=8), use_tqdm=False)[0]
    assert [c.index for c in eight.outputs] == list(range(8))
    assert len({tuple(c.token_ids) for c in eight.outputs}) == 8
    assert all(c.finish_reason == "length" for c in eight.outputs)
    noise = params.clone(seed=None, n=3)
    for n in (1, 2, 5):
        for engine in (llm, cached):
            outputs = engine.generate([prompt, prompt, [9]], [params.clone(n=n), noise, noise], use_tqdm=False)
            assert [c.token_ids for c in outputs[0].outputs] == [c.token_ids for c in eight.outputs[:n]]
    # The prompt's full blocks are computed once and shared, with or without the cache.
    assert eight.num_cached_tokens == 0


def test_unseeded_requests_differ(make_llm: MakeLLM) -> None:
    """B065: without a seed nothing repeats, within an engine or between two."""
    params = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)
    texts = [o.outputs[0].text for _ in range(2) for o in make_llm().generate([[5]] * 20, params, use_tqdm=False)]
    assert len(set(texts)) == 40


def test_order_is_kept(make_llm: MakeLLM) -> None:
    """1,000 prompts of mixed length come back in the order given, each with its own prompt."""
    rng = random.Random(4)
    prompts = [[rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 30))] for _ in range(1000)]
    params = [SamplingParams(temperature=0.0, max_tokens=1 + i % 3, ignore_eos=True) for i in range(1000)]
    outputs = make_llm().generate(prompts, params, use_tqdm=False)
    assert [o.prompt_token_ids for o in outputs] == prompts
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1 + i % 3 for i in range(1000)]
