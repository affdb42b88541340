"""The commands that talk to a server, against a server that cuts its answers at awkward places."""

from __future__ import annotations

import asyncio
import builtins
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samovar.cli.connection import Connection
from samovar.cli.http_stream import Address, RequestRefused, ServerUnreachable, get_json, request
from samovar.cli.main import main
from samovar.errors import ConfigError
from tests.cli.fake_api import FakeApi, running


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with running(FakeApi()) as server:
        yield server


async def stream(api: FakeApi, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async with request(Address.parse(api.url), "POST", path, {"stream": True} | body) as answer:
        return [event async for event in (await answer.check()).events()]


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 40), st.lists(st.text(min_size=1, max_size=4), max_size=4))
def test_events_survive_any_cut(api: FakeApi, cut: int, texts: list[str]) -> None:
    api.cut, api.texts = cut, texts
    events = asyncio.run(stream(api, "/completions", {"prompt": "x"}))
    assert [e["choices"][0]["text"] for e in events if e["choices"]] == texts
    assert events[-1]["usage"]["completion_tokens"] == len(texts)


def test_a_long_event_is_read_whole(api: FakeApi) -> None:
    api.texts, api.cut = ["x" * 300_000], 4096
    events = asyncio.run(stream(api, "/completions", {"prompt": "x"}))
    assert events[0]["choices"][0]["text"] == "x" * 300_000


def test_errors_keep_their_message_and_status(api: FakeApi) -> None:
    with pytest.raises(RequestRefused, match="temperature is too high") as caught:
        asyncio.run(stream(api, "/completions", {"temperature": 9}))
    assert caught.value.status == 400
    api.error_in_stream = "it broke"
    with pytest.raises(RequestRefused, match="it broke"):
        asyncio.run(stream(api, "/completions", {"prompt": "x"}))


def test_nobody_there() -> None:
    with pytest.raises(ServerUnreachable, match=r"nothing answers at http://127\.0\.0\.1:1"):
        asyncio.run(get_json(Address.parse("http://127.0.0.1:1"), "/v1/models"))


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\n", b"nonsense\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{}",
                                    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"])  # fmt: skip
async def test_broken_answers(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises((ServerUnreachable, RequestRefused)):
            await get_json(Address(port=port), "/")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:1/v1", Address("h", 1, "/v1")),
        ("http://h", Address("h", 80)),
        ("https://h/x/", Address("h", 443, "/x", is_tls=True)),
        ("unix:/tmp/s", Address(uds="/tmp/s")),
    ],
)
def test_addresses(url: str, address: Address) -> None:
    assert Address.parse(url) == address


@pytest.mark.parametrize("url", ["", "h:1", "ftp://h", "http://", "http://h:port", "http://h:99999"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError, match="--url"):
        Address.parse(url)


def test_one_question(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["chat", "--url", api.url, "-q", "Hi?", "--system-prompt", "Be brief.", "--max-tokens", "5", "--stats"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert out == "Hello!\n" and "first token" in err and "3 tokens" in err
    assert api.seen[0]["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi?"}]
    assert api.seen[0]["max_tokens"] == 5 and api.seen[0]["model"] == "fake" and "temperature" not in api.seen[0]


def test_an_answer_has_an_end(api: FakeApi) -> None:
    """Without --max-tokens a rambling model is stopped all the same."""
    assert main(["chat", "--url", api.url, "-q", "Hi?"]) == 0
    assert api.seen[0]["max_tokens"] == 1024


@pytest.mark.parametrize("command", ["chat", "complete"])
def test_an_interrupted_answer(command: str, api: FakeApi) -> None:
    """Ctrl-C in the middle: exit code 130, and the line is ended."""
    api.texts, api.cut, api.delay = ["word "] * 50, 60, 20.0
    words = [sys.executable, "-m", "samovar", command, "--url", api.url, "-q", "Hi?"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stderr is not None
        begin = child.stdout.read(4)
        child.send_signal(signal.SIGINT)
        rest, err = child.communicate(timeout=30)
    assert begin == b"word" and rest.endswith(b"\n") and child.returncode == 130
    assert err == b""


def test_a_conversation(api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(
        [
            "One",
            "/help",
            "Two",
            "",
            "/nonsense",
            "/system Be kind.",
            "Three",
            "/clear",
            "Four",
            "/system",
            "/exit",
            "No",
        ]
    )
    monkeypatch.setattr(builtins, "input", lambda *_: next(lines))
    assert main(["chat", "--url", api.url]) == 0
    assert next(lines) == "No"
    out = capsys.readouterr().out
    assert "/system TEXT" in out and "unknown command /nonsense" in out and "Be kind." in out
    histories = [[(m["role"], m["content"]) for m in body["messages"]] for body in api.seen]
    one, hello, kind = ("user", "One"), ("assistant", "Hello!"), ("system", "Be kind.")
    assert histories == [[one], [one, hello, ("user", "Two")], [kind, ("user", "Three")], [kind, ("user", "Four")]]


def test_a_refusal_does_not_end_the_conversation(
    api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lines() -> Iterator[str]:
        api.error_in_stream = "it broke"
        yield "One"
        api.error_in_stream = None
        yield "Two"

    typed = lines()

    def read(*_: str) -> str:
        for line in typed:
            return line
        raise EOFError

    monkeypatch.setattr(builtins, "input", read)
    assert main(["chat", "--url", api.url]) == 0
    assert "it broke" in capsys.readouterr().err
    assert [m["content"] for m in api.seen[-1]["messages"]] == ["Two"]


def test_completion(api: FakeApi, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "--url", api.url, "-q", "Once", "--max-tokens", "3", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "Hello!\n"
    assert api.seen[0]["prompt"] == "Once" and api.seen[0]["temperature"] == 0


def test_keys(api: FakeApi, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    api.api_key = "secret"
    monkeypatch.delenv("SAMOVAR_API_KEY", raising=False)
    assert main(["chat", "--url", api.url, "-q", "x"]) == 1
    assert "--api-key" in capsys.readouterr().err
    assert main(["chat", "--url", api.url, "-q", "x", "--api-key", "secret"]) == 0
    monkeypatch.setenv("SAMOVAR_API_KEY", "secret")
    assert main(["complete", "--url", api.url, "-q", "x"]) == 0


def test_no_server_and_no_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "http://127.0.0.1:1/v1", "-q", "x"]) == 1
    assert "start one with 'samovar serve smollm2'" in capsys.readouterr().err


def test_generate_keeps_order_and_reports_failures(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: list[Any] = [{"prompt": f"p{i}", "id": f"id{i}", "max_tokens": i + 1} for i in range(20)]
    lines += [
        "a bare string",
        {"messages": [{"role": "user", "content": "x"}], "n": 2},
        {"prompt": "x", "temperature": 9},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    words = ["generate", str(source), "-o", str(target), "--url", api.url, "--concurrency", "4", "--temperature", "0.5"]
    api.delay = 0.01
    assert main(words) == 1
    assert "1 of 23 prompts failed" in capsys.readouterr().err
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["index"] for line in written] == list(range(23))
    assert [line.get("id") for line in written[:20]] == [f"id{i}" for i in range(20)]
    assert written[0]["text"] == "Hello!" and written[21]["texts"] == ["Hello!"] * 2
    assert written[22]["error"] == "temperature is too high"
    assert api.most_running == 4
    assert all("id" not in body for body in api.seen) and api.seen[0]["temperature"] == 0.5
    assert main(words) == 2
    assert "exists already; --overwrite" in capsys.readouterr().err


def test_generate_from_text(api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "in.txt"
    source.write_text("one\n\ntwo\n")
    assert main(["generate", str(source), "--url", api.url, "--chat"]) == 0
    assert [json.loads(line)["text"] for line in capsys.readouterr().out.splitlines()] == ["Hello!"] * 2
    assert sorted(body["messages"][0]["content"] for body in api.seen) == ["one", "two"]


@pytest.mark.parametrize(
    ("target", "words"),
    [("-o /dev/full --overwrite", "--output /dev/full: "), ("> /dev/full", "standard output: "), ("| true", None)],
)
def test_generate_where_nothing_can_be_written(api: FakeApi, tmp_path: Path, target: str, words: str | None) -> None:
    """A full disk is one line, a reader that leaves is none; neither is a traceback, now or when Python ends."""
    source = tmp_path / "in.txt"
    source.write_text("one\n" * 8)
    api.delay = 0.05
    line = f"set -o pipefail; {sys.executable} -m samovar generate {source} --url {api.url} {target}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    if words is None:
        assert done.stderr == ""
    else:
        assert done.stderr.startswith(f"samovar: {words}cannot be written from answer 0 on: No space left on device")
        assert len(done.stderr.splitlines()) == 1


def test_generate_says_that_the_server_left(
    api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of one request arrives as the line it is, not in an exception group."""

    async def leave(*_: Any) -> Any:
        raise ServerUnreachable("nobody there")

    source = tmp_path / "in.txt"
    source.write_text("one\ntwo\n")
    monkeypatch.setattr(Connection, "ask", leave)
    assert main(["generate", str(source), "--url", api.url]) == 1
    assert capsys.readouterr().err == "samovar: nobody there\n"


def test_generate_never_writes_over_its_input(api: FakeApi, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, link = tmp_path / "in.txt", tmp_path / "link.txt"
    source.write_text("one\n")
    link.symlink_to(source)
    for name in (source, link, tmp_path / "." / "in.txt"):
        assert main(["generate", str(source), "-o", str(name), "--overwrite", "--url", api.url]) == 2
        assert f"--output {name}: is the input file" in capsys.readouterr().err
    assert source.read_text() == "one\n"


def test_generate_copies_ids_that_are_no_utf8(api: FakeApi, tmp_path: Path) -> None:
    """JSON can carry half of a surrogate pair, UTF-8 cannot: it is written as JSON carries it."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "x", "id": "\\ud800"}')
    assert main(["generate", str(source), "-o", str(target), "--url", api.url]) == 0
    assert json.loads(target.read_text())["id"] == "\ud800"


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", ":1: is not JSON"), ('"ok"\n{"a": 1}', ":2: needs either"), ('{"prompt": 1, "messages": []}', ":1: needs either"),
     ("\n", "holds no prompt")],
)  # fmt: skip
def test_generate_names_bad_lines(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text(content)
    assert main(["generate", str(source)]) == 2
    assert message in capsys.readouterr().err
