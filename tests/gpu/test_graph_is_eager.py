"""Captured decode steps say what the same steps say when they are launched one by one, and what the CPU says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from samovar import LLM
from tests.gpu.tiny_models import KINDS, VOCAB
from tests.gpu.workload import Case, Outcome, check_ids, check_rich, growing_cases, rich_cases, run, sampled_cases

MakeLLM = Callable[..., LLM]
OnCpu = Callable[[str], list[Outcome]]
BY_KIND = pytest.mark.parametrize("kind", list(KINDS))


@BY_KIND
def test_the_comparison_means_something(on_cpu: OnCpu, kind: str) -> None:
    """The models neither repeat themselves nor agree on one answer."""
    outcomes = on_cpu(kind)
    assert len({token for outcome in outcomes for token in outcome.ids}) > VOCAB // 8
    assert sum(len(set(outcome.ids)) > len(outcome.ids) // 2 for outcome in outcomes) > len(outcomes) // 2


@BY_KIND
@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_float32_is_the_cpu(engines: MakeLLM, cases: list[Case], on_cpu: OnCpu, kind: str, eager: bool) -> None:
    """The oracle: float32 on the CPU, one request after the other; here all at once, and twice."""
    llm = engines(kind, enforce_eager=eager)
    for _ in range(2):
        check_ids(llm, cases, on_cpu(kind), run(llm, cases), flips=1)


@BY_KIND
def test_every_batch_size(engines: MakeLLM, cases: list[Case], on_cpu: OnCpu, kind: str) -> None:
    """Batches that fill a captured size and batches that leave rows of it empty."""
    llm = engines(kind, enforce_eager=False)
    for size in (1, 2, 3, 5, 8, 9, 17, 33):
        check_ids(llm, cases[-size:], on_cpu(kind)[-size:], run(llm, cases[-size:]), flips=1)


TIGHT: dict[str, dict[str, Any]] = {
    "chunks of 48": {"max_num_batched_tokens": 48, "max_num_seqs": 16},
    "few at a time": {"max_num_seqs": 3},
    "blocks of 64": {"block_size": 64},
    "not overlapped": {"async_scheduling": False},
    "cached": {"enable_prefix_caching": True, "block_size": 16},
}


@BY_KIND
@pytest.mark.parametrize("how", list(TIGHT))
def test_other_ways_through(fresh_llm: MakeLLM, cases: list[Case], on_cpu: OnCpu, kind: str, how: str) -> None:
    """Prefill beside decode in one step, few slots, other block sizes, cached prompts."""
    if kind != "llama" and not how.startswith("chunks"):
        pytest.skip("one model shows it: nothing here depends on the layers")
    llm = fresh_llm(kind, **TIGHT[how])
    check_ids(llm, cases, on_cpu(kind), run(llm, cases), flips=1)
    if how == "cached":
        check_ids(llm, cases, on_cpu(kind), run(llm, cases), flips=1)
        assert llm._engine.stats().prefix_cache_hits > 0
    usage = llm._engine.call("block_usage")
    assert usage["used"] == usage["used_slots"] == 0


@BY_KIND
def test_preempted_is_not(engines: MakeLLM, fresh_llm: MakeLLM, kind: str) -> None:
    """Sequences that lose their blocks in the middle of captured steps, and come back."""
    cases = growing_cases(30)
    roomy = engines(kind, enforce_eager=True)
    expected = run(roomy, cases)
    llm = fresh_llm(kind, num_gpu_blocks_override=28, max_model_len=150, max_num_seqs=32, block_size=16)
    check_ids(roomy, cases, expected, run(llm, cases), flips=1)
    assert llm._engine.stats().num_preemptions > len(cases) // 4
    assert llm._engine.call("block_usage")["used"] == 0


@BY_KIND
def test_bfloat16_graphs_are_eager(engines: MakeLLM, cases: list[Case], kind: str) -> None:
    """In the type that is served. Kernels may differ with the batch size, so near ties may fall either way."""
    eager = engines(kind, dtype="bfloat16", enforce_eager=True)
    expected = run(eager, cases)
    check_ids(eager, cases, expected, run(engines(kind, dtype="bfloat16"), cases), flips=len(cases) // 4)


@BY_KIND
def test_sampled_graphs_are_eager(engines: MakeLLM, kind: str) -> None:
    """Seeded requests draw the same numbers on both paths, whatever runs beside them."""
    cases = sampled_cases(40)
    expected = run(engines(kind, enforce_eager=True), cases)
    llm = engines(kind, enforce_eager=False)
    check_rich(expected, run(llm, cases), flips=1, tolerance=0)
    check_rich(expected[:7], run(llm, cases[:7]), flips=1, tolerance=0)
    assert len({tuple(outcome.ids) for outcome in expected}) > len(cases) // 2


@BY_KIND
def test_rich_requests_are_eager(engines: MakeLLM, kind: str) -> None:
    """Penalties, biases, masks, stops and log-probabilities among plain rows: steps that are only partly captured."""
    cases = rich_cases(40)
    expected = run(engines(kind, enforce_eager=True), cases)
    llm = engines(kind, enforce_eager=False)
    check_rich(expected, run(llm, cases), flips=1, tolerance=2e-3)
    for first in (0, 13, 26):
        part = slice(first, first + 13)
        check_rich(expected[part], run(llm, cases[part]), flips=1, tolerance=2e-3)
    assert {"stop", "length"} <= {outcome.finish_reason for outcome in expected}
    assert any(outcome.logprobs for outcome in expected) and any(outcome.prompt_logprobs for outcome in expected)
