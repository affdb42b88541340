"""Engine and loop with a fake worker: overlap, failures, aborts, idling."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest

from samovar.config.groups import SchedulerConfig
from samovar.core.outputs import SequenceOutput
from samovar.core.sequence import FinishReason
from samovar.engine.engine import Engine
from samovar.engine.executors.on_stream import StreamExecutor
from samovar.engine.in_process_client import InProcessEngineClient
from samovar.engine.loop import IDLE_SECONDS
from samovar.errors import EngineDeadError, OverloadedError, ValidationError
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.scheduler import Scheduler
from tests.engine.fakes import POISON, FakeWorker, LaunchingFake, expected, fake_engine, fake_info, request


def drain(engine: Engine) -> dict[tuple[str, int], list[SequenceOutput]]:
    """Step until there is no work; outputs by sequence."""
    news: dict[tuple[str, int], list[SequenceOutput]] = {}
    while engine.has_work:
        for output in engine.step():
            news.setdefault((output.request_id, output.index), []).append(output)
    return news


def tokens_of(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_blocks", [200, 24])
def test_every_request_gets_its_own_tokens(overlap: bool, num_blocks: int) -> None:
    """B080: with 24 blocks sequences are preempted all the time; the tokens stay the same, overlapped or not."""
    rng = random.Random(1)
    engine = fake_engine(FakeWorker(num_blocks), overlap=overlap, max_num_batched_tokens=64)
    requests = [
        request([rng.randrange(1, 900) for _ in range(rng.randint(1, 120))], rng.randint(1, 60)) for _ in range(60)
    ]
    for r in requests:
        engine.add(r)
    news = drain(engine)
    for r in requests:
        assert tokens_of(news[r.request_id, 0]) == expected(r.prompt_token_ids, r.params.max_tokens or 0)
        assert news[r.request_id, 0][-1].finish_reason is FinishReason.LENGTH
    assert engine.call("block_usage")["used"] == 0
    engine.close()


def test_the_next_step_is_launched_before_the_last_is_read() -> None:
    """While step n runs, step n + 1 is already queued behind it; never more than that."""
    worker = FakeWorker()
    engine = fake_engine(worker)
    engine.add(request([1, 2, 3], 50))
    submitted: list[int] = []
    submit = engine._executor.submit
    engine._executor.submit = lambda step: (submitted.append(step.step_id), submit(step))[1]  # type: ignore[method-assign]
    engine.step()
    assert submitted == [0, 1]
    engine.step()
    assert submitted == [0, 1, 2]
    drain(engine)
    engine.close()


def test_a_failed_step_ends_its_own_sequences_only() -> None:
    """A step that raises costs the requests in it; the ones before, beside (in the queue) and after it go on."""
    engine = fake_engine(FakeWorker(), max_num_seqs=2)
    bad, other = request([5, POISON], 8), request([6, 7], 8)
    waiting = request([8, 9], 8)
    for r in (bad, other, waiting):
        engine.add(r)
    news = drain(engine)
    assert news[bad.request_id, 0][-1].finish_reason is FinishReason.ERROR
    assert "no room" in (news[bad.request_id, 0][-1].error or "")
    assert tokens_of(news[waiting.request_id, 0]) == expected([8, 9], 8)
    assert engine.call("block_usage")["used"] == 0 and engine.call("block_usage")["used_slots"] == 0
    engine.close()


def test_a_device_that_fails_every_step_ends_the_engine() -> None:
    """A lost device must not turn into an endless row of failed requests on a server that says it is healthy."""
    engine = fake_engine(FakeWorker())
    with pytest.raises(EngineDeadError, match="in a row"):
        for _ in range(40):
            engine.add(request([POISON], 1))
            drain(engine)
    engine.close()


def test_a_launch_that_raises_is_a_failed_step() -> None:
    """Without a thread between them, what `launch` raises comes out of `result`, and the engine ends the same sequences."""
    worker = FakeWorker()
    settings = SchedulerOptions(max_model_len=512, async_scheduling=True)
    engine = Engine(StreamExecutor(LaunchingFake(worker)), Scheduler(settings, worker.num_blocks))
    bad, good = request([5, POISON], 8), request([6, 7], 8)
    engine.add(bad)
    news = drain(engine)
    engine.add(good)
    news |= drain(engine)
    assert "no room" in (news[bad.request_id, 0][-1].error or "")
    assert tokens_of(news[good.request_id, 0]) == expected([6, 7], 8)
    assert engine.stats().host_seconds > 0
    engine.close()


def test_host_time_is_not_idle_time() -> None:
    """Time between two requests is nobody's work."""
    engine = fake_engine(FakeWorker())
    for _ in range(2):
        engine.add(request([1, 2], 4))
        drain(engine)
        time.sleep(0.2)
    assert 0 < engine.stats().host_seconds < 0.1
    engine.close()


async def test_idle_moments_prepare() -> None:
    """Only after a while without messages, one piece at a time, until there is nothing left; requests come first."""
    worker = FakeWorker(delay=0.001)
    engine = fake_engine(worker)
    prepared: list[float] = []

    def prepare() -> bool:
        assert not engine.has_work
        prepared.append(time.monotonic())
        return len(prepared) < 3

    engine.prepare = prepare  # type: ignore[method-assign]
    client = InProcessEngineClient(engine, fake_info(worker))
    began = time.monotonic()
    assert tokens_of(await collect(client, [1], 20)) == expected([1], 20)
    await until(lambda: len(prepared) == 3)
    await asyncio.sleep(2.5 * IDLE_SECONDS)
    assert len(prepared) == 3 and prepared[0] - began > IDLE_SECONDS
    assert all(later - earlier > 0.9 * IDLE_SECONDS for earlier, later in pairwise(prepared))
    await client.close()


def test_unknown_call() -> None:
    engine = fake_engine(FakeWorker())
    with pytest.raises(ValidationError, match="reset_prefix_cache"):
        engine.call("nonsense")
    engine.close()


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 10.0) -> None:
    """Wait for a condition; what it was is in the traceback if it does not come true."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found if isinstance(found, bool) else await found:
            return
        assert time.monotonic() < end, "the condition did not come true"
        await asyncio.sleep(0.002)


async def collect(client: InProcessEngineClient, *args: object, **kwargs: object) -> list[SequenceOutput]:
    return [output async for output in client.generate(request(*args, **kwargs))]  # type: ignore[arg-type]


async def in_process(worker: FakeWorker, **options: object) -> InProcessEngineClient:
    return InProcessEngineClient(fake_engine(worker, **options), fake_info(worker))


async def test_streams_and_choices() -> None:
    """Many requests with several choices at once: every choice ends exactly once with its own tokens."""
    client = await in_process(FakeWorker(100))
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(collect(client, [i + 1, i + 2], 5 + i % 7, n=1 + i % 3)) for i in range(50)]
    for i, task in enumerate(tasks):
        outputs = task.result()
        for choice in range(1 + i % 3):
            own = [o for o in outputs if o.index == choice]
            assert tokens_of(own) == expected([i + 1, i + 2], 5 + i % 7)
            assert [o.finish_reason for o in own if o.finish_reason] == [FinishReason.LENGTH]
    await client.close()


async def test_news_are_sent_while_the_next_step_runs() -> None:
    """In time all the same: those of the last step at once, and before the answer to a call that came meanwhile."""
    worker = FakeWorker()
    client = await in_process(worker)
    heard: list[int] = []

    async def listen() -> None:
        async for output in client.generate(request([4], 60)):
            heard.extend(output.token_ids)

    listening = asyncio.create_task(listen())
    await until(lambda: len(heard) >= 3)
    worker.gate.clear()
    # The engine waits for a step, and nothing that it knows is kept back.
    await asyncio.sleep(0.05)
    await until(lambda: len(heard) == worker.num_steps)
    worker.gate.set()
    await client.call("reset_prefix_cache")
    await listening
    assert heard == expected([4], 60)
    await client.close()


async def test_an_idle_loop_sleeps() -> None:
    """No busy waiting: an idle engine uses no processor time, or little beside what half a second of waiting would be."""
    client = await in_process(FakeWorker())
    await collect(client, [1], 3)
    before = time.process_time()
    await asyncio.sleep(0.5)
    assert time.process_time() - before < 0.25
    await client.close()


async def test_abort_in_every_state() -> None:
    """B086, B088, B089: requests closed while queued, in prefill and in decode leave blocks, slots and the next request fine."""
    worker = FakeWorker(64)
    client = await in_process(worker, max_num_seqs=4, max_num_batched_tokens=32)
    rng = random.Random(2)

    async def leave_early(i: int) -> None:
        stream = client.generate(request([1 + i % 900] * rng.randint(1, 100), 60, n=rng.choice([1, 1, 2])))
        task = asyncio.ensure_future(anext(stream))
        done, _ = await asyncio.wait([task], timeout=rng.random() * 0.02)
        if done and not task.exception():
            for _ in range(rng.randint(0, 10)):
                await anext(stream)
        else:
            task.cancel()
            await asyncio.wait([task])
        await stream.aclose()

    for _ in range(10):
        await asyncio.gather(*(leave_early(i) for i in range(20)))
    usage: dict[str, int] = {}

    async def is_empty() -> bool:
        usage.update(await client.call("block_usage"))
        return (usage["used"], usage["used_slots"], usage["requests"]) == (0, 0, 0)

    await until(is_empty)
    await until(lambda: client.stats.num_running == client.stats.num_waiting == 0)
    assert tokens_of(await collect(client, [3, 4], 9)) == expected([3, 4], 9)
    await client.close()


async def test_a_queued_request_that_left_never_runs() -> None:
    """B089, B091: five queued clients leave; the running one is not disturbed and the engine is idle right after it."""
    worker = FakeWorker(delay=0.001)
    client = await in_process(worker, max_num_seqs=1)
    worker.gate.clear()
    running = asyncio.ensure_future(collect(client, [1, 2], 100))
    await until(lambda: client._conversation.is_waiting)
    queued = [asyncio.ensure_future(collect(client, [9, i], 100)) for i in range(1, 6)]
    await until(lambda: len(client._conversation._live) == 6)
    worker.gate.set()
    for task in queued:
        task.cancel()
    assert tokens_of(await running) == expected([1, 2], 100)
    assert (await client.call("block_usage"))["requests"] == 0
    assert worker.num_steps < 110
    await client.close()


async def test_abort_one_choice() -> None:
    """The front end matched a stop string in choice 1: it ends silently, choice 0 goes on."""
    client = await in_process(FakeWorker(delay=0.001))
    r = request([4, 5], 40, n=2)
    seen: list[SequenceOutput] = []
    async for output in client.generate(r):
        seen.append(output)
        if len(seen) == 6:
            await client.abort(r.request_id, 1)
            seen_before = len([o for o in seen if o.index == 1])
    assert tokens_of([o for o in seen if o.index == 0]) == expected([4, 5], 40)
    assert len([o for o in seen if o.index == 1]) == seen_before
    await client.close()


async def test_same_id_twice_is_refused_without_harm() -> None:
    """B013: ids are made by the front end, so this cannot happen from outside; if it does, the first one lives on."""
    client = await in_process(FakeWorker(delay=0.001))
    r = request([1, 2], 20)
    stream = client.generate(r)
    first = await anext(stream)
    with pytest.raises(ValidationError, match="already running"):
        await anext(client.generate(r))
    rest = [o async for o in stream]
    assert tokens_of([first, *rest]) == expected([1, 2], 20)
    await client.close()


async def test_queue_limits() -> None:
    """Beyond the limits a request is refused at once with a reason of a closed set; the others are served."""
    worker = FakeWorker()
    worker.gate.clear()
    limits = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=2, max_num_queued_tokens=100)
    client = InProcessEngineClient(fake_engine(worker, max_num_seqs=1), fake_info(worker), limits=limits)
    tasks = [asyncio.ensure_future(collect(client, [i, i], 4)) for i in range(1, 4)]
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError) as full:
        await collect(client, [1], 1)
    assert full.value.reason == "queue_requests"
    gone = tasks.pop()
    gone.cancel()
    await asyncio.wait([gone])
    with pytest.raises(OverloadedError) as full:
        await collect(client, [1] * 100, 1)
    assert full.value.reason == "queue_tokens"
    worker.gate.set()
    for i, task in enumerate(tasks, 1):
        assert tokens_of(await task) == expected([i, i], 4)
    await client.close()


async def test_impossible_request_is_an_error_of_its_own() -> None:
    """B085: a prompt larger than the pool ends with an error; the loop and the next request do not care."""
    client = await in_process(FakeWorker(2))
    outputs = await collect(client, [1] * 100, 5)
    assert [o.finish_reason for o in outputs] == [FinishReason.ERROR] and "100 tokens" in (outputs[0].error or "")
    assert tokens_of(await collect(client, [2] * 20, 5)) == expected([2] * 20, 5)
    outputs = await collect(client, [3] * 30, 50)
    assert outputs[-1].finish_reason is FinishReason.LENGTH and len(tokens_of(outputs)) == 3
    await client.close()


async def test_closing_fails_whoever_waits() -> None:
    client = await in_process(FakeWorker(delay=0.005))
    task = asyncio.ensure_future(collect(client, [1], 300))
    await until(lambda: client._conversation.is_waiting)
    await client.close()
    with pytest.raises(EngineDeadError, match="shut down"):
        await task
    with pytest.raises(EngineDeadError):
        await collect(client, [1], 1)
    assert not client.is_alive
