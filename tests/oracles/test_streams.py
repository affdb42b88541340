"""Streaming and not streaming give the same, over a real engine process; aborts leave nothing behind.

Rows: B179 (a stream without a final reason), B013 (ids), B086 and B088 (aborts leak), B097 (salts).
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from samovar import LLM, AsyncLLM, EngineArgs, OutputKind, RequestOutput, SamplingParams
from samovar.engine.prompts import PromptType
from samovar.schedule.rounds import MOST_ROUNDS
from tests.oracles.workload import OPTIONS, VOCAB, Case, essence, random_cases

CONCURRENCY = 16


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tiny_model: Path) -> AsyncIterator[AsyncLLM]:
    """An engine process with the tiny model and a pool small enough to preempt."""
    options = {**OPTIONS, "num_gpu_blocks_override": 48, "max_num_batched_tokens": 128}
    async with AsyncLLM.from_engine_args(EngineArgs(str(tiny_model), **options)) as llm:
        yield llm


async def stream(llm: AsyncLLM, case: Case) -> list[RequestOutput]:
    """All deltas of one case."""
    prompt, params = case
    return [
        o async for o in llm.generate(prompt, params.clone(output_kind=OutputKind.DELTA), request_id="same for all")
    ]


def joined(deltas: list[RequestOutput]) -> list[tuple[object, ...]]:
    """Deltas of one request put together, in the form of `essence`."""
    choices: dict[int, list[object]] = {}
    for delta in deltas:
        for c in delta.outputs:
            ids, text, ends = choices.setdefault(c.index, [[], "", []])
            choices[c.index] = [ids + c.token_ids, text + c.text, ends]  # type: ignore[operator]
            if c.finish_reason is not None:
                ends.append((c.finish_reason, c.stop_reason))  # type: ignore[attr-defined]
    for _, _, ends in choices.values():
        assert len(ends) == 1, "each choice ends exactly once"  # type: ignore[arg-type]
    return [(index, ids, text, *ends[0]) for index, (ids, text, ends) in sorted(choices.items())]  # type: ignore[index]


@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
async def test_streamed_is_not_streamed(served: AsyncLLM, tiny_model: Path, count: int) -> None:
    """B179, B013: streams under concurrency 16, all with one client-side id: deltas add up to what `LLM` returns."""
    cases = random_cases(count, seed=5)
    with LLM(str(tiny_model), **OPTIONS) as llm:
        whole = llm.generate([p for p, _ in cases], [s for _, s in cases], use_tqdm=False)
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(case: Case) -> list[RequestOutput]:
        async with gate:
            return await stream(served, case)

    streams = await asyncio.gather(*(one(case) for case in cases))
    for case, deltas, expected in zip(cases, streams, whole, strict=True):
        assert joined(deltas) == essence(expected), case
        assert deltas[-1].finished and not any(d.finished for d in deltas[:-1])


async def test_cumulative_and_final_only(served: AsyncLLM) -> None:
    """Each cumulative output extends the one before; FINAL_ONLY sends one."""
    params = SamplingParams(temperature=1.0, seed=1, n=2, max_tokens=12, ignore_eos=True)
    grown = [o async for o in served.generate([5, 6], params)]
    for before, after in itertools.pairwise(grown):
        for a, b in zip(before.outputs, after.outputs, strict=True):
            assert b.token_ids[: len(a.token_ids)] == a.token_ids and b.text.startswith(a.text)
    final = [o async for o in served.generate([5, 6], params.clone(output_kind=OutputKind.FINAL_ONLY))]
    assert len(final) == 1 and essence(final[0]) == essence(grown[-1])
    assert len(grown) >= 2 * 12 / MOST_ROUNDS  # a small model says several tokens a step


async def leave(llm: AsyncLLM, rng: random.Random) -> None:
    """Start a request and go away at a random moment."""
    prompt: PromptType = [rng.randrange(3, VOCAB) for _ in range(rng.randint(1, 150))]
    params = SamplingParams(
        temperature=1.0, n=rng.choice([1, 1, 3]), max_tokens=rng.randint(1, 150), output_kind=OutputKind.DELTA
    )
    outputs = llm.generate(prompt, params)
    moment = asyncio.create_task(_read(outputs, rng.randint(0, 8)))
    await asyncio.wait([moment], timeout=rng.random() * 0.2)
    moment.cancel()
    await asyncio.wait([moment])
    await outputs.aclose()  # type: ignore[attr-defined]


async def _read(outputs: AsyncIterator[RequestOutput], count: int) -> None:
    for _ in range(count):
        if await anext(outputs, None) is None:
            return


async def idle_usage(llm: AsyncLLM) -> dict[str, int]:
    """Who holds what once the engine has nothing to do."""
    for _ in range(200):
        usage: dict[str, int] = await llm._client.call("block_usage")
        if usage["requests"] == 0 and usage["launched_steps"] == 0:
            return usage
        await asyncio.sleep(0.02)
    raise AssertionError(f"the engine does not come to rest: {usage}")


@pytest.mark.parametrize("count", [200, pytest.param(2000, marks=pytest.mark.slow)])
async def test_aborts_leave_nothing(served: AsyncLLM, count: int) -> None:
    """B086, B088: requests left at random moments, in every state; blocks, slots, memory and answers are as before."""
    rng = random.Random(6)
    probe = ([7, 8, 9], SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    expected = joined(await stream(served, probe))
    await asyncio.gather(*(leave(served, rng) for _ in range(50)))
    before = await idle_usage(served)
    engine = psutil.Process(served._client.pid)
    memory = engine.memory_info().rss
    gate = asyncio.Semaphore(32)

    async def one() -> None:
        async with gate:
            await leave(served, rng)

    await asyncio.gather(*(one() for _ in range(count)))
    after = await idle_usage(served)
    for name in ("free", "used", "used_slots", "requests", "sequences"):
        assert after[name] == before[name], name
    assert after["used"] == after["used_slots"] == 0
    assert served._client.stats.num_running == served._client.stats.num_waiting == 0
    assert not served._running
    assert engine.memory_info().rss - memory < 24 * 2**20
    assert joined(await stream(served, probe)) == expected


async def test_abort_by_label(served: AsyncLLM) -> None:
    """`abort` ends what carries the label, with `finish_reason` abort, and nothing else."""
    params = SamplingParams(temperature=0.0, max_tokens=250, ignore_eos=True, output_kind=OutputKind.DELTA)
    begun = asyncio.Event()

    async def follow(label: str) -> str | None:
        last = None
        async for output in served.generate([9, 9], params, request_id=label):
            begun.set()
            last = output
        assert last is not None
        return last.outputs[-1].finish_reason

    other = asyncio.create_task(follow("b"))
    # More than the pool holds: whatever the speed, the last of them have not ended when the first token comes.
    doomed = [asyncio.create_task(follow("a")) for _ in range(40)]
    await begun.wait()
    await served.abort("a")
    assert [await task for task in doomed][-20:] == ["abort"] * 20
    assert await other == "length"


async def test_salts_do_not_share(served: AsyncLLM) -> None:
    """B097: equal prompts share cached blocks within one salt only."""
    ids = list(range(10, 90))
    params = SamplingParams(temperature=0.0, max_tokens=2)

    async def cached(salt: str | None) -> int:
        prompt: PromptType = (
            {"prompt_token_ids": ids} if salt is None else {"prompt_token_ids": ids, "cache_salt": salt}
        )
        return [o async for o in served.generate(prompt, params)][-1].num_cached_tokens

    assert [await cached(s) for s in ("a", "b", "a", "b", None, None)] == [0, 0, 64, 64, 0, 64]
