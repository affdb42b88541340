"""Pause and sleep over a fake worker: what becomes of live requests, who is refused, what is given back and brought back."""

from __future__ import annotations

import asyncio

import pytest

from samovar.config.engine import EngineConfig
from samovar.config.groups import ModelConfig, SchedulerConfig
from samovar.core.outputs import SequenceOutput
from samovar.core.sequence import FinishReason
from samovar.engine.engine import Engine
from samovar.engine.loop import IDLE_SECONDS
from samovar.engine.process_client import ProcessEngineClient
from samovar.errors import ConflictError, OverloadedError, ValidationError
from tests.engine.fakes import FakeWorker, expected, fake_engine, request
from tests.engine.test_engine_loop import collect, drain, in_process, tokens_of, until

AWAKE = ["cache released", "weights released, level 1", "weights restored", "cache restored"]


def started(worker: FakeWorker, count: int = 3) -> tuple[Engine, list[str], dict[str, list[SequenceOutput]]]:
    """An engine in the middle of some requests."""
    engine = fake_engine(worker)
    ids, news = [], {}
    for i in range(1, count + 1):
        r = request([i, i + 1], 30)
        engine.add(r)
        ids.append(r.request_id)
        news[r.request_id] = list[SequenceOutput]()
    for _ in range(5):
        for output in engine.step():
            news[output.request_id].append(output)
    return engine, ids, news


def hear(engine: Engine, news: dict[str, list[SequenceOutput]]) -> None:
    for (request_id, _), outputs in drain(engine).items():
        news[request_id] += outputs


@pytest.mark.parametrize("call", ["pause", "sleep 0", "sleep 1", "sleep 2", "release_kv_cache_memory"])
def test_kept_requests_go_on_as_if_nothing_had_been(call: str) -> None:
    """Mode keep: the steps under way are booked, nothing runs meanwhile, and the tokens are those of a run without."""
    worker = FakeWorker()
    engine, ids, news = started(worker)
    name, _, level = call.partition(" ")
    arguments = {"mode": "keep", **({"level": int(level)} if level else {})}
    engine.call(name, **arguments)
    hear(engine, news)
    steps = worker.num_steps
    assert not engine.has_work and engine.step() == [] and worker.num_steps == steps
    assert engine.call("is_paused") and engine.call("is_sleeping") == (call != "pause")
    assert (engine.stats().refuses is None) == (call == "pause")
    late = request([7, 8], 9)
    engine.add(late)
    news[late.request_id] = []
    if call == "pause":
        engine.call("resume")
    else:
        assert engine.call("wake_up") is True
    assert not engine.call("is_paused") and not engine.call("is_sleeping") and engine.stats().refuses is None
    hear(engine, news)
    for i, request_id in enumerate(ids, 1):
        assert tokens_of(news[request_id]) == expected([i, i + 1], 30)
    assert tokens_of(news[late.request_id]) == expected([7, 8], 9)
    assert engine.call("block_usage")["used"] == 0
    engine.close()


def test_abort_and_wait() -> None:
    """ "abort" ends all with finish_reason abort, told by the next step; "wait" lets them finish."""
    engine, ids, news = started(FakeWorker())
    engine.call("pause")
    hear(engine, news)
    assert [news[i][-1].finish_reason for i in ids] == [FinishReason.ABORT] * 3
    assert all(tokens_of(news[r]) == expected([i, i + 1], 30)[: len(tokens_of(news[r]))] for i, r in enumerate(ids, 1))
    engine.close()
    engine, ids, news = started(FakeWorker())
    engine.call("sleep", mode="wait")
    hear(engine, news)
    assert [tokens_of(news[r]) for r in ids] == [expected([i, i + 1], 30) for i in (1, 2, 3)]
    engine.close()


def test_waking_in_parts() -> None:
    """Tags bring back their part; steps are made once both are there. Deeper sleep drops what the host kept."""
    worker = FakeWorker()
    engine = fake_engine(worker)
    engine.call("sleep", level=1)
    assert engine.call("wake_up", tags=["weights"]) is False
    with pytest.raises(ConflictError, match="has no K/V cache: wake it up"):
        engine.call("resume")
    assert engine.call("is_sleeping") and engine.call("wake_up", tags=["kv_cache"]) is True
    assert worker.notes == AWAKE
    assert engine.call("wake_up") is True and worker.notes == AWAKE
    engine.call("sleep", level=1)
    engine.call("sleep", level=2)
    assert engine.call("server_info")["state"] == "asleep (level 2)"
    assert engine.call("wake_up", tags=["kv_cache"]) is False and engine.call("wake_up", tags=["weights"]) is True
    assert engine.call("release_kv_cache_memory") == 4096 and engine.call("wake_up", tags=[]) is True
    engine.close()


def test_no_room_to_sleep_or_to_wake() -> None:
    """Neither harms: the engine stays awake, or sleeps on and may be woken later."""
    worker = FakeWorker()
    engine, ids, news = started(worker)
    worker.is_crowded = True
    with pytest.raises(ConflictError, match="the engine cannot sleep: the host has no room"):
        engine.call("sleep", mode="keep")
    assert not engine.call("is_paused") and engine.stats().refuses is None
    hear(engine, news)
    assert [tokens_of(news[r]) for r in ids] == [expected([i, i + 1], 30) for i in (1, 2, 3)]
    worker.is_crowded = False
    engine.call("sleep", level=2)
    worker.is_crowded = True
    with pytest.raises(ConflictError, match="the engine cannot wake up: no room on the device"):
        engine.call("wake_up")
    assert engine.call("is_sleeping")
    worker.is_crowded = False
    assert engine.call("wake_up") is True
    engine.close()


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("sleep", {"level": 3}, "level must be one of 0, 1, 2, got 3"),
        ("sleep", {"level": True}, "level must be"),
        ("sleep", {"mode": "now"}, "mode must be one of abort, wait, keep, got 'now'"),
        ("pause", {"mode": ["keep"]}, "mode must be"),
        ("wake_up", {"tags": "weights"}, "tags must be a list"),
        ("wake_up", {"tags": ["weight"]}, "tags must be one of weights"),
        ("reset_prefix_cache", {"reset_running_requests": 1}, "must be true or false"),
        ("resume", {"mode": "keep"}, "resume has no argument 'mode'; it has none"),
        ("start_profile", {}, "--profiler-dir"),
        ("nonsense", {}, "unknown engine call 'nonsense'"),
    ],
)
def test_bad_calls_change_nothing(name: str, arguments: dict[str, object], message: str) -> None:
    engine = fake_engine(FakeWorker())
    with pytest.raises(ValidationError, match=message.replace("(", r"\(")):
        engine.can_answer(name, arguments)
        engine.call(name, **arguments)
    assert engine.standby.state == "running" and engine.stats().refuses is None
    engine.close()


def test_reset_running_requests() -> None:
    """Running sequences lose their blocks, and say the same; the next request finds nothing cached."""
    engine, ids, news = started(FakeWorker())
    assert engine.call("reset_prefix_cache", reset_running_requests=True)
    hear(engine, news)
    assert [tokens_of(news[r]) for r in ids] == [expected([i, i + 1], 30) for i in (1, 2, 3)]
    assert engine.stats().num_preemptions == 3
    engine.close()


async def test_a_client_of_a_paused_engine() -> None:
    """New requests are refused with a reason; a pause that waits refuses them from the start, and answers at the end;
    kept requests wait; a sleeping engine is not taken for a stuck one and uses no processor time."""
    worker = FakeWorker(delay=0.002)
    client = await in_process(worker)
    live = asyncio.ensure_future(collect(client, [1, 2], 60))
    await until(lambda: worker.num_steps > 3)
    pause = asyncio.ensure_future(client.call("pause", mode="wait"))
    await until(lambda: client.refuses is not None)
    assert not pause.done() and not live.done()
    with pytest.raises(OverloadedError, match="being paused") as refused:
        await collect(client, [1], 1)
    assert refused.value.reason == "paused"
    await pause
    assert tokens_of(await live) == expected([1, 2], 60)
    with pytest.raises(OverloadedError, match="paused; resume it first"):
        await collect(client, [1], 1)
    await client.call("resume")
    assert client.refuses is None
    await client.call("pause", mode="keep")
    waiting = asyncio.ensure_future(collect(client, [3, 4], 5))
    await asyncio.sleep(0.05)
    assert not waiting.done() and not client._conversation.is_waiting
    await client.call("sleep", mode="keep")
    assert client.refuses == "the engine is asleep (level 1); wake it up first"
    assert await client.call("wake_up")
    assert tokens_of(await waiting) == expected([3, 4], 5)
    ended = asyncio.ensure_future(collect(client, [5, 6], 400))
    await until(lambda: worker.num_steps > 80)
    await client.call("sleep")
    assert (await ended)[-1].finish_reason is FinishReason.ABORT
    await client.close()


async def test_a_pause_that_waits_is_answered_by_an_engine_with_nothing_to_prepare() -> None:
    """The last step of the last request answers whoever waited for it: no other message need come."""
    client = await in_process(FakeWorker(delay=0.002))
    assert tokens_of(await collect(client, [1, 2], 5)) == expected([1, 2], 5)
    await asyncio.sleep(2 * IDLE_SECONDS)  # From now on an idle loop sleeps until something is said to it.
    live = asyncio.ensure_future(collect(client, [1, 2], 60))
    await until(lambda: client.stats.num_running > 0)
    await asyncio.wait_for(client.call("pause", mode="wait"), 10)
    assert tokens_of(await live) == expected([1, 2], 60)
    await client.close()


async def test_requests_that_cross_a_pause_are_refused() -> None:
    """What was sent before the front end knew of a pause is refused like what comes after it, and does not wait."""
    client = await in_process(FakeWorker())
    for call, arguments in (("pause", {"mode": "abort"}), ("sleep", {"level": 1, "mode": "keep"})):
        pause = asyncio.ensure_future(client.call(call, **arguments))
        await asyncio.sleep(0)  # The call is on its way; nothing was heard of it here.
        assert client.refuses is None
        with pytest.raises(OverloadedError, match="resume it|wake it up") as refused:
            await asyncio.wait_for(collect(client, [3, 4], 5), 10)
        assert refused.value.reason == "paused"
        await pause
        await client.call("wake_up")
        await client.call("resume")
        assert tokens_of(await collect(client, [3, 4], 5)) == expected([3, 4], 5)
    await client.close()


async def test_errors_of_calls_keep_their_kind_and_waking_may_take_longer_than_the_timeout() -> None:
    """Over the socket: 409 is told from 400, and an engine that loads for longer than --engine-timeout is not replaced."""
    config = EngineConfig(model=ModelConfig(model="drowsy"), scheduler=SchedulerConfig(max_num_seqs=8))
    client = ProcessEngineClient(config, engine_timeout=3.0, entry="tests.engine.fake_process")
    await client.start()
    pid = client.pid
    with pytest.raises(ConflictError):
        await client.call("start_profile", prefix="x")
    with pytest.raises(ValidationError) as wrong:
        await client.call("sleep", level=7)
    assert not isinstance(wrong.value, ConflictError)
    await client.call("sleep", level=2)
    await asyncio.sleep(3.5)
    assert client.is_alive and client.refuses
    assert await client.call("wake_up") is True
    assert client.pid == pid and client.refuses is None
    await client.close()
