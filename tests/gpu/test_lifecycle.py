"""Requests that end, are aborted or run out of memory while steps are in flight leave the others alone and nothing behind."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from samovar import LLM
from samovar.core.request import Request
from samovar.core.sequence import FinishReason
from samovar.models.decoder import DecoderLM
from tests.gpu.tiny_models import VOCAB
from tests.gpu.workload import Case, check_ids, greedy_cases, params, run

MakeLLM = Callable[..., LLM]


def stopping_cases(count: int) -> list[Case]:
    """Short prompts; outputs end at a stop token or at their length, whichever comes first."""
    rng = random.Random(21)
    cases: list[Case] = []
    for _ in range(count):
        prompt = [rng.randrange(2, VOCAB) for _ in range(rng.randint(1, 60))]
        stops = rng.sample(range(VOCAB), rng.choice([0, 20, 60]))
        cases.append((prompt, params(max_tokens=rng.randint(1, 50), stop_token_ids=stops)))
    return cases


@pytest.mark.parametrize("count", [500])
def test_aborts_in_flight(engines: MakeLLM, device: str, count: int) -> None:
    """Requests arrive, end and are aborted between any two steps: the others' ids stay, all blocks come back."""
    count = count if device == "cuda" else 60
    llm = engines("llama")
    cases = stopping_cases(count)
    expected = run(llm, cases)
    assert {outcome.finish_reason for outcome in expected} == {"stop", "length"}
    ids, aborted = drive(llm, cases)
    assert len(aborted) > count // 20 and len(ids) == count - len(aborted)
    differing = [index for index, tokens in ids.items() if tokens != expected[index].ids]
    assert len(differing) <= 1 + count // 100, f"{len(differing)} requests differ: {differing}"
    usage = llm._engine.call("block_usage")
    assert (usage["used"], usage["used_slots"], usage["requests"], usage["sequences"]) == (0, 0, 0, 0)
    assert usage["free"] == usage["num_blocks"] - 1 or usage["free"] == usage["num_blocks"]


def drive(llm: LLM, cases: list[Case]) -> tuple[dict[int, list[int]], set[int]]:
    """Step the engine by hand; returns (case -> ids of those that ended, cases that were aborted)."""
    rng, engine = random.Random(4), llm._engine
    waiting = list(enumerate(cases))
    running: dict[str, int] = {}
    ids: dict[int, list[int]] = {}
    ended: set[int] = set()
    aborted: set[int] = set()
    while waiting or running or engine.has_work:
        for _ in range(rng.choice([0, 0, 1, 9])):
            if waiting:
                index, (prompt, asked) = waiting.pop()
                request: Request = llm._preparer.from_ids(prompt, asked)
                engine.add(request)
                running[request.request_id], ids[index] = index, []
        if running and rng.random() < 0.15:
            victim = rng.choice(list(running))
            engine.abort(victim)
            aborted.add(running.pop(victim))
        for output in engine.step():
            assert output.request_id in running, "news of a request that is over"
            index = running[output.request_id]
            ids[index] += output.token_ids
            if output.finish_reason is not None:
                assert output.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), output
                ended.add(index)
                del running[output.request_id]
    return {index: tokens for index, tokens in ids.items() if index in ended}, aborted


@contextmanager
def starved(device: str, tokens: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Inside, steps of `tokens` tokens find no memory: torch may reserve hardly more than now (a GPU), or the model says
    so (a CPU). Yields how often an allocation has failed so far."""
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        before = torch.cuda.memory_stats()["num_ooms"]
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (24 << 20)) / total)
        try:
            yield lambda: torch.cuda.memory_stats()["num_ooms"] - before
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        return
    failed, forward = 0, DecoderLM.forward

    def fail(self: DecoderLM, batch: object) -> torch.Tensor:
        nonlocal failed
        if len(batch.token_ids) >= tokens:  # type: ignore[attr-defined]
            failed += 1
            raise torch.OutOfMemoryError("no memory, for a test")
        return forward(self, batch)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(DecoderLM, "forward", fail)
        yield lambda: failed


def test_one_request_pays_for_missing_memory(fresh_llm: MakeLLM, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt for which no memory is left ends alone, or is computed in parts; its neighbours and its successors do not
    notice."""
    long = 7000 if device == "cuda" else 1500
    # Blocks for everything: what fails is the work of the step.
    llm = fresh_llm("llama", max_model_len=long + 64, max_num_batched_tokens=8192, num_gpu_blocks_override=1200)
    cases = greedy_cases(8)
    rng = random.Random(2)
    huge: Case = ([rng.randrange(2, VOCAB) for _ in range(long)], params(max_tokens=3))
    expected = run(llm, cases)
    whole = run(llm, [huge])[0]
    with starved(device, long, monkeypatch) as failures:
        got = run(llm, [*cases[:4], huge, *cases[4:]])
        assert failures() > 0, "memory was never missing: the test shows nothing"
    neighbours = [*got[:4], *got[5:]]
    check_ids(llm, cases, expected, neighbours, flips=1)
    assert got[4].finish_reason == "error" or got[4].ids == whole.ids
    check_ids(llm, [huge], [whole], run(llm, [huge]), flips=1)
    assert llm._engine.call("block_usage")["used"] == 0
