"""Batches: one answer a line in the input's order, whatever the line; going on after any stop; bounded memory."""

from __future__ import annotations

import asyncio
import json
import random
import resource
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samovar.config.groups import SchedulerConfig, ServerConfig
from samovar.errors import ConfigError, EngineDeadError, SamovarError
from samovar.server import batch
from samovar.server.app import create_app
from samovar.server.batch import BatchRun, LineReader
from samovar.server.batch_files import BatchOutput, InputLine, check_path, open_input, open_output, read_lines
from samovar.server.state import ServingState
from samovar.text.prepare import Preparer
from tests.server.scripted_engine import ScriptedEngine, saying

LONGEST = 4096
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> str:
    """One line of a batch file."""
    fields = {"prompt": "x"} if url == COMPLETIONS and not body else {}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields | body})


@asynccontextmanager
async def serving(preparer: Preparer, engine: ScriptedEngine | None = None) -> AsyncIterator[ServingState]:
    """A state with an engine."""
    state = ServingState(ServerConfig(enable_request_id_headers=True))
    engine = engine or ScriptedEngine(saying("abc"))
    state.attach(engine, preparer)
    yield state
    state.close()
    await engine.close()


async def run(
    preparer: Preparer,
    source: Path,
    target: Path,
    *,
    engine: ScriptedEngine | None = None,
    concurrency: int = 8,
    watch: Callable[[int, int], None] = lambda count, at: None,
) -> BatchRun:
    """The whole way of the command, over a scripted engine."""
    async with serving(preparer, engine) as state:
        with (
            open_input(str(source)) as file,
            open_output(str(target), overwrite=False, input_path=str(source)) as output,
        ):
            lines, reader = read_lines(file, LONGEST), LineReader()
            for known in output.match(lines):
                reader.read(known)
            app = create_app(None, None, state.config, state=state)
            job = BatchRun(app, reader, output, concurrency, lambda: state.status == "ready")
            await job.run(lines, watch)
            return job


def answers(target: Path) -> list[dict[str, Any]]:
    """The lines of an output, each of the published form."""
    content = target.read_text(encoding="utf-8")
    assert not content or content.endswith("\n")
    found = [json.loads(one) for one in content.splitlines()]
    for one in found:
        assert one.keys() == {"id", "custom_id", "response", "error"}
        if one["response"] is not None:
            assert one["response"].keys() == {"status_code", "request_id", "body"}
            assert (one["error"] is None) == (one["response"]["status_code"] == 200)
        else:
            assert one["error"].keys() == {"code", "message"}
    assert len({one["id"] for one in found}) == len(found)
    return found


async def test_every_api(preparer: Preparer, tmp_path: Path) -> None:
    """B10: each url's own answer, in the order of the lines, the ids of requests in the answers."""
    source, target = tmp_path / "in", tmp_path / "out"
    hello = [{"role": "user", "content": "hi"}]
    source.write_text(
        "\n".join(
            [
                line("a", CHAT, messages=hello, max_tokens=20), line("b", prompt="x"), line("c", "/v1/responses", input="x", model="tiny"),
                line("d", "/v1/messages", messages=hello, max_tokens=20, model="tiny"), line("e", CHAT, messages=hello, n=2, stream=False),
            ]
        )
    )  # fmt: skip
    await run(preparer, source, target)
    found = answers(target)
    assert [one["custom_id"] for one in found] == ["a", "b", "c", "d", "e"] and not any(one["error"] for one in found)
    bodies = [one["response"]["body"] for one in found]
    assert bodies[0]["choices"][0]["message"]["content"] == bodies[1]["choices"][0]["text"] == "abc"
    assert bodies[2]["output"][-1]["content"][0]["text"] == bodies[3]["content"][0]["text"] == "abc"
    assert [c["message"]["content"] for c in bodies[4]["choices"]] == ["abc", "abc1"]
    assert found[0]["response"]["request_id"] in bodies[0]["id"]


WRONG: dict[str, tuple[str, str]] = {
    "nonsense": ("invalid_json", "not JSON"),
    "[1]": ("invalid_line", "JSON object"),
    "{}": ("invalid_line", "custom_id is missing"),
    '{"custom_id": 5}': ("invalid_line", "custom_id must be a string"),
    '{"custom_id": ""}': ("invalid_line", "1 to 512"),
    '{"custom_id": "%s"}' % ("x" * 513): ("invalid_line", "1 to 512"),
    '{"custom_id": "q"}': ("invalid_line", "method is missing"),
    '{"custom_id": "r", "method": "GET", "url": "/v1/completions", "body": {}}': ("invalid_method", "must be POST"),
    '{"custom_id": "s", "method": "POST", "url": "/v1/embeddings", "body": {}}': ("invalid_url", "/v1/embeddings"),
    '{"custom_id": "t", "method": "POST", "url": "/sleep", "body": {}}': ("invalid_url", "/sleep"),
    '{"custom_id": "u", "method": "POST", "url": "/v1/completions"}': ("invalid_line", "body is missing"),
    '{"custom_id": "v", "method": "POST", "url": "/v1/completions", "body": [1]}': (
        "invalid_line",
        "body must be an object",
    ),
    line("w", prompt="x", stream=True): ("invalid_request", "body.stream"),
    line("same"): ("duplicate_custom_id", "'same'"),
    '{"custom_id": "x", "body": {"prompt": "%s"}}' % ("y" * LONGEST): ("line_too_long", "--max-body-bytes"),
    "[" * 3000: ("invalid_line", "JSON object"),
    '{"custom_id": "z", "body": %s' % ("[" * 3000): ("invalid_json", ""),
    '{"custom_id": "\\ud800"}': ("invalid_json", "not JSON"),
}


async def test_wrong_lines(preparer: Preparer, tmp_path: Path) -> None:
    """A line that cannot be sent has an error that says why; those around it are answered."""
    source, target = tmp_path / "in", tmp_path / "out"
    lines = [line("same")]
    for at, wrong in enumerate(WRONG):
        lines += [wrong, line(f"fine-{at}")]
    source.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode() + b"\n\xff\xfe\n" + line("last").encode())
    await run(preparer, source, target)
    found = answers(target)
    assert len(found) == len(lines) + 2
    assert all(one["error"] is None for one in found[0:-2:2]) and found[-1]["custom_id"] == "last"
    for one, (code, text) in zip(
        [*found[1:-2:2], found[-2]], [*WRONG.values(), ("invalid_json", "not UTF-8")], strict=True
    ):
        assert one["response"] is None and one["error"]["code"] == code and text in one["error"]["message"], one
        assert one["error"]["message"].startswith("line ")
    assert next(o for o in found if (o["error"] or {}).get("code") == "duplicate_custom_id")["custom_id"] == "same"


async def test_refused_requests(preparer: Preparer, tmp_path: Path) -> None:
    """What the server refuses is the line's answer, with the server's status, and its error at the usual place too."""
    source, target = tmp_path / "in", tmp_path / "out"
    bad = [
        line("a", prompt="x", temperature=9),
        line("b", prompt="x", model="other"),
        line("c", "/v1/messages", messages=[], max_tokens=1, model="tiny"),
    ]
    source.write_text("\n".join([*bad, line("d")]))
    await run(preparer, source, target)
    found = answers(target)
    assert [one["response"]["status_code"] for one in found] == [400, 404, 400, 200]
    assert (
        found[0]["error"]["message"] == found[0]["response"]["body"]["error"]["message"]
        and "temperature" in found[0]["error"]["message"]
    )
    assert [one["error"] and one["error"]["code"] for one in found] == [
        "BadRequestError",
        "NotFoundError",
        "invalid_request_error",
        None,
    ]


async def test_order_and_window(preparer: Preparer, tmp_path: Path) -> None:
    """Answers that come in any order are written in the input's; no more run, and no more are read, than was allowed."""
    source, target = tmp_path / "in", tmp_path / "out"
    lengths = random.Random(1).choices(range(1, 40), k=300)
    lengths[0] = 400  # the first line is the last to be done: the window fills behind it
    source.write_text("\n".join(line(str(i), prompt="x", max_tokens=n, ignore_eos=True) for i, n in enumerate(lengths)))
    most = 0
    engine = ScriptedEngine(lambda r, i: [70] * 400)
    hear = engine._hear

    def count(message: Any) -> None:
        nonlocal most
        hear(message)
        most = max(most, engine.num_running)
        if not written:
            assert len(engine.requests) <= 4 * batch.WINDOW_FACTOR

    written: list[int] = []
    engine._conversation._send = count
    await run(preparer, source, target, engine=engine, concurrency=4, watch=lambda n, at: written.append(n))
    found = answers(target)
    assert [one["custom_id"] for one in found] == [str(i) for i in range(300)]
    assert [one["response"]["body"]["usage"]["completion_tokens"] for one in found] == lengths
    assert most == 4 and written == sorted(written) and written[-1] == 300


class Stop(Exception):
    """The end of a run that a test cuts off."""


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(st.data())
def test_any_stop_can_be_gone_on_from(preparer: Preparer, tmp_path: Path, data: st.DataObject) -> None:
    """However a run ends, and wherever the file is cut by a crash, running again gives what one whole run gives."""
    count = data.draw(st.integers(1, 12))
    source, whole, target = tmp_path / "in", tmp_path / "whole", tmp_path / "out"
    rows = [
        data.draw(st.sampled_from([line(f"r{i}"), "broken", line("r0"), "", line(f"r{i}", prompt="x", n=-1)]))
        for i in range(count)
    ]
    source.write_text("\n".join(rows) + "\n" * data.draw(st.integers(0, 2)))
    whole.unlink(missing_ok=True)
    target.unlink(missing_ok=True)
    asyncio.run(_run_fresh(preparer, source, whole))
    for _ in range(data.draw(st.integers(0, 3))):
        cancel_after = data.draw(st.integers(0, 4))
        asyncio.run(_run_and_stop(preparer, source, target, cancel_after))
        content = target.read_bytes()
        # How much was written depends on the machine's speed; what is drawn must not.
        target.write_bytes(content[: len(content) * data.draw(st.integers(0, 1000)) // 1000])
    asyncio.run(_run_fresh(preparer, source, target))
    assert [_essence(one) for one in answers(target)] == [_essence(one) for one in answers(whole)]


async def _run_fresh(preparer: Preparer, source: Path, target: Path) -> None:
    await run(preparer, source, target, concurrency=2)


async def _run_and_stop(preparer: Preparer, source: Path, target: Path, after: int) -> None:
    engine = ScriptedEngine(saying("abc"), step_seconds=0.001)
    task = asyncio.ensure_future(run(preparer, source, target, engine=engine, concurrency=2))
    await asyncio.sleep(after * 0.004)
    task.cancel()
    await asyncio.wait([task])
    if not task.cancelled():
        task.result()


def _essence(one: dict[str, Any]) -> Any:
    response = one["response"]
    return one["id"], one["custom_id"], one["error"], response and response["status_code"]


async def test_a_cancelled_run_writes_what_is_done(preparer: Preparer, tmp_path: Path) -> None:
    """What was answered before the stop is kept, and no request is left behind."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(str(i)) for i in range(50)))
    engine = ScriptedEngine(lambda r, i: [70] * 3 if len(engine.requests) < 20 else [70] * 400, step_seconds=0.001)
    task = asyncio.ensure_future(run(preparer, source, target, engine=engine, concurrency=8))
    while not target.exists() or len(target.read_bytes().splitlines()) < 5:
        await asyncio.sleep(0.005)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() and engine.num_running == 0
    assert 5 <= len(answers(target)) < 50


async def test_it_is_another_batch(preparer: Preparer, tmp_path: Path) -> None:
    """An output that does not answer this input is refused and stays as it was."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join([line("a"), line("b")]))
    await run(preparer, source, target)
    kept = target.read_bytes()
    for changed in (
        [line("a", prompt="y"), line("b")],
        [line("b"), line("a")],
        [line("a")],
        ["", line("a"), line("b")],
    ):
        source.write_text("\n".join(changed))
        with pytest.raises(ConfigError, match="line [12]: .*--overwrite"):
            await run(preparer, source, target)
        assert target.read_bytes() == kept
    for diary in ("my diary\n", "my diary", "{", '{"id":"mine'):
        target.write_text(diary)
        with pytest.raises(ConfigError, match="--overwrite") if diary != "{" else nullcontext():
            await run(preparer, source, target)
        assert diary == "{" or target.read_text() == diary


def _no_lines() -> Iterator[InputLine]:
    return iter(())


def test_the_output_is_ours_alone(tmp_path: Path) -> None:
    """Two runs cannot write one file; the input is never overwritten; what cannot be opened is named."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("")
    with open_output(str(target), overwrite=False, input_path=str(source)):
        with (
            pytest.raises(ConfigError, match="another run"),
            open_output(str(target), overwrite=True, input_path=str(source)),
        ):
            pass
    with (
        pytest.raises(ConfigError, match="is the input file"),
        open_output(str(source), overwrite=True, input_path=str(source)),
    ):
        pass
    with pytest.raises(ConfigError, match="cannot be read"), open_input(str(tmp_path / "none")):
        pass
    with (
        pytest.raises(ConfigError, match="cannot be written"),
        open_output(str(tmp_path), overwrite=False, input_path=""),
    ):
        pass
    for path in ("http://x/y", "s3://x/y", "-", ""):
        with pytest.raises(ConfigError, match="--output-file"):
            check_path("--output-file", path)


def test_overwrite(tmp_path: Path) -> None:
    """It starts from nothing."""
    target = tmp_path / "out"
    target.write_text("old\n")
    with open_output(str(target), overwrite=True, input_path="x") as output:
        assert list(output.match(_no_lines())) == []
        output.append([b"{}"])
    assert target.read_text() == "{}\n"


async def test_a_full_disk(preparer: Preparer, tmp_path: Path) -> None:
    """The run ends, says so, and leaves whole lines; with space again the same command goes on."""
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(str(i)) for i in range(20)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(SamovarError, match="free space and run the same command again"):
            await run(preparer, source, target, concurrency=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert len(answers(target)) < 20
    await run(preparer, source, target)
    assert [one["custom_id"] for one in answers(target)] == [str(i) for i in range(20)]


async def test_a_full_queue_is_waited_for(preparer: Preparer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More requests than the engine takes: every line is answered all the same."""
    monkeypatch.setattr(batch, "LAST_WAIT", 0.05)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(str(i)) for i in range(30)))
    limits = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1)
    engine = ScriptedEngine(saying("abc"), delay=0.02, limits=limits)
    await run(preparer, source, target, engine=engine, concurrency=16)
    assert [one["response"]["status_code"] for one in answers(target)] == [200] * 30


async def test_an_engine_that_comes_back(preparer: Preparer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that met a dead engine is asked again; one that always meets one is told after a few times."""
    monkeypatch.setattr(batch, "FIRST_WAIT", 0.001)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text("\n".join(line(str(i)) for i in range(6)))
    engine = ScriptedEngine(saying("abc"), step_seconds=0.002)
    deaths = 0

    async def kill() -> None:
        nonlocal deaths
        while True:
            await asyncio.sleep(0.004)
            if engine.num_running and deaths < 3:
                engine.die()
                deaths += 1
                await asyncio.sleep(0.03)
                engine._conversation.open()

    killer = asyncio.ensure_future(kill())
    await run(preparer, source, target, engine=engine, concurrency=3)
    killer.cancel()
    assert deaths == 3 and [one["response"]["status_code"] for one in answers(target)] == [200] * 6


async def test_an_engine_that_stays_away(preparer: Preparer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run ends, and can be gone on with."""
    monkeypatch.setattr(batch, "RESTART_SECONDS", 0.2)
    source, target = tmp_path / "in", tmp_path / "out"
    source.write_text(line("a"))
    engine = ScriptedEngine(saying("abc"), delay=0.05)
    task = asyncio.ensure_future(run(preparer, source, target, engine=engine))
    await asyncio.sleep(0.02)
    engine.die()
    with pytest.raises(EngineDeadError, match="again to go on"):
        await task
    assert answers(target) == []


class _Nowhere(BatchOutput):
    """An output that keeps nothing."""

    def __init__(self) -> None:
        super().__init__("", -1)

    def append(self, lines: list[bytes]) -> None:
        """Drop them."""


async def test_memory_does_not_grow_with_the_input(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten times the lines take little more memory: a digest each."""

    async def answered(app: Any, path: str, body: bytes, headers: Any) -> Any:
        await asyncio.sleep(0)
        return batch.Answer(200, [], b'{"text":"%s"}' % (b"y" * 1000))

    monkeypatch.setattr(batch, "post", answered)

    async def peak(count: int) -> int:
        lines = (InputLine(i, line(str(i), prompt="x" * 2000).encode(), False, 0) for i in range(count))
        job = BatchRun(None, LineReader(), _Nowhere(), 4, lambda: True)  # type: ignore[arg-type]
        tracemalloc.start()
        await job.run(lines, lambda n, at: None)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert job.num_answered == count
        return most

    few, many = await peak(200), await peak(2000)
    assert many - few < 1800 * 200 and few < 2_000_000, (few, many)


def test_read_lines(tmp_path: Path) -> None:
    """Numbers count all lines; blank ones are no requests; a long one is cut off and told of; ends are places in the file."""
    path = tmp_path / "in"
    path.write_bytes(b"a\n\n  \r\nbb\r\n" + b"c" * 100 + b"\n" + b"d" * 10 + b"\n" + b"e" * 11)
    with open_input(str(path)) as file:
        found = list(read_lines(file, 10))
    assert [(one.number, one.raw[:11], one.is_too_long, one.end) for one in found] == [
        (1, b"a", False, 2), (4, b"bb", False, 11), (5, b"c" * 11, True, 112), (6, b"d" * 10, False, 123), (7, b"e" * 11, True, 134),
    ]  # fmt: skip
    assert len({one.answer_id for one in found}) == 5
