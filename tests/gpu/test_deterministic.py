"""`--deterministic`: a request's tokens depend on nothing but the request."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from samovar import LLM
from tests.gpu.tiny_models import KINDS
from tests.gpu.workload import Case, Outcome, greedy_cases, run, sampled_cases

MakeLLM = Callable[..., LLM]


@pytest.fixture(scope="module")
def requests(device: str) -> list[Case]:
    """64 requests (a CPU: few), greedy and seeded, some with prompts longer than the chunks below."""
    half = 32 if device == "cuda" else 6
    return [*greedy_cases(half, seed=8, longest=400), *sampled_cases(half, seed=9)]


def options(device: str) -> dict[str, object]:
    """bfloat16 and `deterministic`; the CPU has no such mode and is exact enough in float32 for this."""
    return {"dtype": "bfloat16", "deterministic": True} if device == "cuda" else {"dtype": "float32"}


def same(one: list[Outcome], other: list[Outcome], how: str) -> None:
    """Fail unless ids are identical, without exception."""
    parted = [index for index, (a, b) in enumerate(zip(one, other, strict=True)) if a.ids != b.ids]
    assert not parted, f"{how}: {len(parted)} of {len(one)} requests differ: {parted}"


@pytest.mark.parametrize("kind", list(KINDS))
def test_batches_and_chunks_change_nothing(
    engines: MakeLLM, fresh_llm: MakeLLM, device: str, requests: list[Case], kind: str
) -> None:
    """Identical ids at batch 1, 7 and 64, and with prompts whole or in chunks of 64 and 256; graphs and eager."""
    llm = engines(kind, **options(device))
    alone = [run(llm, [case])[0] for case in requests]
    sevens = [outcome for first in range(0, len(requests), 7) for outcome in run(llm, requests[first : first + 7])]
    same(alone, sevens, "batches of 7")
    same(alone, run(llm, requests), "all at once")
    same(alone, run(llm, requests[::-1])[::-1], "all at once in another order")
    for chunk in (64, 256):
        same(
            alone, run(fresh_llm(kind, max_num_batched_tokens=chunk, **options(device)), requests), f"chunks of {chunk}"
        )
    if kind == "llama":
        same(alone, run(fresh_llm(kind, enforce_eager=True, **options(device)), requests), "without graphs")
