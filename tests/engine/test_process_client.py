"""ProcessEngineClient over a real socket and a real child process (with a fake engine in it): death, restart, orphans."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from samovar.config.engine import EngineConfig
from samovar.config.groups import ModelConfig, SchedulerConfig
from samovar.core.outputs import SequenceOutput
from samovar.engine.child import EngineChild
from samovar.engine.process_client import ProcessEngineClient
from samovar.errors import CheckpointError, EngineDeadError
from tests.engine.fakes import expected, request

ENTRY = "tests.engine.fake_process"
ROOT = Path(__file__).parents[2]


def config(model: str = "fake") -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=model), scheduler=SchedulerConfig(max_num_seqs=8))


@pytest.fixture
async def client() -> AsyncIterator[ProcessEngineClient]:
    made = ProcessEngineClient(config(), engine_timeout=5.0, entry=ENTRY)
    await made.start()
    yield made
    await made.close()


async def tokens(client: ProcessEngineClient, prompt: list[int], count: int) -> list[int]:
    return [t async for output in client.generate(request(prompt, count)) for t in output.token_ids]


def exists(pid: int) -> bool:
    """Whether the process still runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] != "Z"
    except FileNotFoundError:
        return False


async def until(condition: object, seconds: float) -> bool:
    """Wait for a condition."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        await asyncio.sleep(0.02)
    return False


async def test_generates_over_the_socket(client: ProcessEngineClient) -> None:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(tokens(client, [i, i + 1], 20)) for i in range(1, 40)]
    for i, task in enumerate(tasks, 1):
        assert task.result() == expected([i, i + 1], 20)
    assert (await client.call("block_usage"))["used"] == 0
    assert client.is_alive and client.is_ready and client.info.model == "fake"
    assert client._child is not None and not client._child._directory.exists(), "nothing to leave behind"
    with pytest.raises(ValueError, match="unknown engine call"):
        await client.call("nonsense")


async def test_an_abort_reaches_the_engine(client: ProcessEngineClient) -> None:
    """B086: a closed stream is gone from the engine within a second."""
    stream = client.generate(request([1, 2], 400))
    await anext(stream)
    await stream.aclose()
    usage: dict[str, int] = {}
    end = time.monotonic() + 5
    while usage.get("requests", 1) and time.monotonic() < end:
        usage = await client.call("block_usage")
    assert (usage["requests"], usage["used"], usage["used_slots"]) == (0, 0, 0)


async def first(client: ProcessEngineClient, news: list[SequenceOutput], count: int = 500) -> None:
    async for output in client.generate(request([1, 2], count)):
        news.append(output)


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_killed_or_frozen_engine_is_replaced(client: ProcessEngineClient, sign: signal.Signals) -> None:
    """B077: whoever waits fails within seconds, nothing of the old process stays, and the next request is served."""
    news: list[SequenceOutput] = []
    totals: list[int] = []
    client.on_stats(lambda stats: totals.append(stats.generation_tokens))
    waiting = asyncio.ensure_future(first(client, news))
    assert await until(lambda: news, 5)
    old = client.pid
    assert old is not None
    started = time.monotonic()
    os.kill(old, sign)
    with pytest.raises(EngineDeadError):
        await waiting
    assert time.monotonic() - started < 8
    assert not client.is_alive and not client.is_ready
    with pytest.raises(EngineDeadError):
        await tokens(client, [1], 1)
    assert await until(lambda: client.is_ready, 20)
    assert client.pid != old and not exists(old)
    assert await tokens(client, [7, 8], 5) == expected([7, 8], 5)
    assert client.stats.num_running == 0
    assert totals == sorted(totals) and client.stats.generation_tokens >= len(news) + 5, "totals never fall"


async def test_an_idle_engine_that_dies_is_replaced(client: ProcessEngineClient) -> None:
    old = client.pid
    assert old is not None
    os.kill(old, signal.SIGKILL)
    assert await until(lambda: not client.is_ready, 5)
    assert await until(lambda: client.is_ready, 20)
    assert await tokens(client, [7, 8], 5) == expected([7, 8], 5)


async def test_an_engine_without_progress_is_stuck() -> None:
    """B077: the process lives but finishes no step."""
    client = ProcessEngineClient(config("stuck"), engine_timeout=1.0, entry=ENTRY, restart=False)
    await client.start()
    pid = client.pid
    with pytest.raises(EngineDeadError, match="finished no step"):
        await tokens(client, [1], 3)
    assert not client.is_alive
    assert pid is not None and await until(lambda: not exists(pid), 5)
    await client.close()


async def test_a_failed_start_says_why_and_leaves_nothing() -> None:
    phases: list[str] = []
    client = ProcessEngineClient(config("broken"), entry=ENTRY, on_phase=phases.append)
    with pytest.raises(CheckpointError, match="truncated"):
        await client.start()
    assert phases == ["loading"] and client.pid is None and not client.is_alive


async def test_a_broken_supervisor_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error nobody foresaw while the process is started reaches whoever waits for it."""

    def broken(*_: object, **__: object) -> None:
        raise OverflowError("too big to send")

    monkeypatch.setattr("samovar.engine.process_client.EngineChild", broken)
    made = ProcessEngineClient(config(), entry=ENTRY)
    with pytest.raises(EngineDeadError, match="too big to send"):
        await made.start()
    assert not made.is_alive


async def test_a_start_that_hangs_is_ended() -> None:
    """No sign of life for `engine_timeout` seconds: the process is killed, and the error names the phase."""
    phases: list[str] = []
    client = ProcessEngineClient(config("endless"), engine_timeout=2.0, entry=ENTRY, on_phase=phases.append)
    start = asyncio.ensure_future(client.start())
    assert await until(lambda: phases, 20)
    pid = client.pid
    with pytest.raises(EngineDeadError, match=r"no progress for 2 s while it was loading.*--engine-timeout"):
        await start
    assert phases == ["loading"] and client.pid is None
    assert pid is not None and not exists(pid)


async def test_a_slow_start_is_no_stuck_one() -> None:
    """Three seconds of loading with a deadline of two: signs of life keep it alive, and are one phase to the listener."""
    phases: list[str] = []
    client = ProcessEngineClient(config("slow"), engine_timeout=2.0, entry=ENTRY, on_phase=phases.append)
    await client.start()
    assert client.is_ready and phases == ["loading"]
    await client.close()


async def test_a_cancelled_start_leaves_no_process() -> None:
    phases: list[str] = []
    client = ProcessEngineClient(config("endless"), entry=ENTRY, on_phase=phases.append)
    start = asyncio.ensure_future(client.start())
    assert await until(lambda: phases, 10)
    pid = client.pid
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert pid is not None and not exists(pid)


async def test_signals_for_the_terminal_do_not_reach_the_engine(client: ProcessEngineClient) -> None:
    """SIGINT and SIGTERM are the parent's business."""
    pid = client.pid
    assert pid is not None
    for sign in (signal.SIGINT, signal.SIGTERM):
        os.kill(pid, sign)
    assert await tokens(client, [7, 8], 50) == expected([7, 8], 50)
    assert client.pid == pid
    assert os.getsid(pid) != os.getsid(0)


async def test_close_ends_the_process(client: ProcessEngineClient) -> None:
    news: list[SequenceOutput] = []
    waiting = asyncio.ensure_future(first(client, news))
    assert await until(lambda: news, 5)
    pid = client.pid
    await client.close()
    assert pid is not None and not exists(pid)
    with pytest.raises(EngineDeadError, match="shut down"):
        await waiting
    assert not client.is_alive


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


PARENT = """
import asyncio, sys
from samovar.engine.child import EngineChild
from samovar.engine.process_client import ProcessEngineClient
from tests.engine.test_process_client import config, ENTRY
async def main():
    client = ProcessEngineClient(config(sys.argv[1]), entry=ENTRY)
    start = asyncio.ensure_future(client.start())
    while client.pid is None:
        await asyncio.sleep(0.001)
    print(client.pid, flush=True)
    await start
    print("ready", flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.parametrize("model", ["fake", "endless"])
@pytest.mark.parametrize("is_frozen", [False, True])
async def test_no_orphan_when_the_parent_is_killed(model: str, is_frozen: bool, temporary: Path) -> None:
    """B079: kill -9 of the front end, while serving and during load, and with a child that cannot even notice.

    Neither a process nor a file stays behind.
    """
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, model),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env=os.environ | {"TMPDIR": str(temporary)},
    )
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    try:
        if model == "fake":
            assert await parent.stdout.readline() == b"ready\n"
        if is_frozen:
            if model == "endless":
                await asyncio.sleep(1.0)  # Long enough to be under the kernel's watch.
            os.kill(pid, signal.SIGSTOP)
        assert exists(pid)
        parent.kill()
        await parent.wait()
        assert await until(lambda: not exists(pid), 5)
        assert os.listdir(temporary) == []
    finally:
        if exists(pid):
            os.kill(pid, signal.SIGKILL)


async def test_a_parent_killed_at_once_leaves_no_file(temporary: Path) -> None:
    """Killed before the child said a word: the socket has no name already."""
    code = PARENT.replace("print(client.pid, flush=True)", "import os; os.kill(os.getpid(), 9)")
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", code, "fake"), cwd=ROOT, env=os.environ | {"TMPDIR": str(temporary)}
    )
    assert await parent.wait() == -signal.SIGKILL
    assert os.listdir(temporary) == []


def test_the_client_loads_no_torch() -> None:
    code = "import sys, samovar.engine.process_client, samovar.engine.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


async def test_a_process_that_was_started_before() -> None:
    """It is the first one; when it dies another is started."""
    child = EngineChild(config(), entry=ENTRY)
    client = ProcessEngineClient(config(), engine_timeout=5.0, entry=ENTRY, first=child)
    await client.start()
    assert client.pid == child.pid and await tokens(client, [3], 5) == expected([3], 5)
    os.kill(child.pid, signal.SIGKILL)
    assert await until(lambda: client.is_ready and client.pid != child.pid, 30)
    await client.close()
    child.end()  # Nothing is left to end.


@pytest.mark.parametrize("ends", ["client", "child"])
async def test_one_that_was_never_needed_ends(ends: str) -> None:
    child = EngineChild(config(), entry=ENTRY)
    pid = child.pid
    if ends == "client":
        await ProcessEngineClient(config(), entry=ENTRY, first=child).close()
    else:
        child.end()
    assert not exists(pid)
