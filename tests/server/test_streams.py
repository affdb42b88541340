"""The shape of streams, and stream == non-stream in every view: text, tokens, logprobs, usage, finish reasons."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import Counter
from typing import Any

import httpx
import pytest

from samovar.config.groups import ServerConfig
from samovar.text.prepare import Preparer
from tests.server.conftest import REPLY
from tests.server.live import LiveServer, live_client, live_server
from tests.server.scripted_engine import ScriptedEngine, saying
from tests.server.wire import CHAT, COMPLETIONS, HELLO, chunks_of, stream, text_of

BASE: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, COMPLETIONS: {"prompt": "hi", "max_tokens": 60}}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 2])
def test_shape(http: httpx.Client, path: str, n: int) -> None:
    """B178, B179, D31-D33: id and created stable, role first, null until one final reason per choice, no empty delta."""
    chunks = stream(http, path, **BASE[path], n=n)
    assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1
    for index in range(n):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        if path == CHAT:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            mine = mine[1:]
            assert all("role" not in c["delta"] for c in mine)
        reasons = [c["finish_reason"] for c in mine]
        assert reasons[-1] == "stop" and set(reasons[:-1]) == {None}
        assert all(c.get("text") or c.get("delta") for c in mine[:-1])
        assert text_of(chunks, index) == (REPLY if index == 0 else f"{REPLY}{index}")


OPTIONS: dict[str, list[Any]] = {
    "n": [1, 3], "max_tokens": [1, 7, 60], "stop": [None, "wörld", ["🙂", "more"]], "logprobs": [None, 2], "interval": [None, 4],
    "return_token_ids": [None, True], "echo": [None, True], "include_stop_str_in_output": [None, True],
}  # fmt: skip


def test_stream_equals_whole(http: httpx.Client) -> None:
    """B056 and the oracle: for combinations of options that hold every pair, the joined stream is the whole answer."""
    combinations = list(itertools.product((CHAT, COMPLETIONS), itertools.product(*OPTIONS.values())))
    for path, values in combinations[::7]:
        body = BASE[path] | {k: v for k, v in zip(OPTIONS, values, strict=True) if v is not None}
        if (interval := body.pop("interval", None)) is not None:
            body["stream_interval"] = interval
        if path == CHAT and "logprobs" in body:
            body |= {"logprobs": True, "top_logprobs": body["logprobs"]}
        whole = http.post(path, json=body).json()
        chunks = stream(http, path, **body, stream_options={"include_usage": True})
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]
        for choice in whole["choices"]:
            parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
            message = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert text_of(chunks, choice["index"]) == message, body
            assert parts[-1]["finish_reason"] == choice["finish_reason"]
            assert parts[-1]["stop_reason"] == choice["stop_reason"]
            if "return_token_ids" in body:
                assert [t for p in parts for t in p.get("token_ids", ())] == choice["token_ids"]
            assert _logprobs(parts) == _logprobs([choice]), body


def _logprobs(parts: list[dict[str, Any]]) -> list[Any]:
    found = [p["logprobs"] for p in parts if p["logprobs"]]
    if found and "content" in found[0]:
        return [entry for f in found for entry in f["content"]]
    return [
        list(itertools.chain.from_iterable(f[key] for f in found))
        for key in ("tokens", "token_logprobs", "text_offset")
    ]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage(http: httpx.Client, path: str) -> None:
    """D34: usage only when asked for; running usage grows to the final one, which the whole answer has too."""
    assert all("usage" not in c for c in stream(http, path, **BASE[path]))
    chunks = stream(http, path, **BASE[path], stream_options={"include_usage": True, "continuous_usage_stats": True})
    running = [c["usage"]["completion_tokens"] for c in chunks if c["choices"] and "usage" in c]
    assert running == sorted(running) and running[-1] == chunks[-1]["usage"]["completion_tokens"]
    assert http.post(path, json=BASE[path]).json()["usage"] == chunks[-1]["usage"]


def test_usage_counts_cached_tokens(preparer: Preparer) -> None:
    """prompt_tokens_details is what the engine found in its cache, once per prompt; the switches work."""

    def engine() -> ScriptedEngine:
        made = ScriptedEngine(saying("abc"))
        made.cached = 16
        return made

    with live_client(engine, preparer) as (_, http):
        usage = http.post(COMPLETIONS, json={"prompt": ["a" * 20, "b" * 20], "n": 2}).json()["usage"]
        assert usage["prompt_tokens_details"] == {"cached_tokens": 32} and usage["prompt_tokens"] == 40
    config = ServerConfig(port=0, enable_prompt_tokens_details=False, enable_force_include_usage=True)
    with live_client(engine, preparer, config) as (_own, http):
        chunks = stream(http, CHAT, messages=HELLO)
        assert "prompt_tokens_details" not in chunks[-1]["usage"]


def test_stream_interval(http: httpx.Client) -> None:
    """The first token comes at once, then at least `stream_interval` tokens a chunk."""
    chunks = stream(http, COMPLETIONS, prompt="hi", max_tokens=60, stream_interval=10, return_token_ids=True)
    sizes = [len(c["choices"][0]["token_ids"]) for c in chunks if c["choices"][0].get("token_ids")]
    assert sizes[0] == 1 and all(size >= 10 for size in sizes[1:-1]) and len(sizes) < 7


def test_the_servers_stream_interval(preparer: Preparer) -> None:
    """--stream-interval is the default that a request may change."""
    with live_client(lambda: ScriptedEngine(saying("x" * 41)), preparer) as (own, http):
        own.state.stream_interval = 20
        sizes = [len(c["choices"][0]["text"]) for c in stream(http, COMPLETIONS, prompt="a", max_tokens=100)]
        assert sizes == [1, 20, 20, 0]
        assert len(stream(http, COMPLETIONS, prompt="a", max_tokens=100, stream_interval=1)) == 42


def test_echo_stream_with_logprobs(http: httpx.Client) -> None:
    """B056: echo, stream and logprobs together: the prompt's entries first, the first of them null."""
    chunks = stream(http, COMPLETIONS, prompt="Warsaw is", echo=True, logprobs=1, max_tokens=20, n=2)
    for index in (0, 1):
        first = next(c["choices"][0] for c in chunks if c["choices"][0]["index"] == index)
        assert first["text"] == "Warsaw is" and first["logprobs"]["token_logprobs"][0] is None
        assert len(first["logprobs"]["tokens"]) == 9


@pytest.mark.parametrize("echo", [True, False])
def test_no_tokens_asked_for(http: httpx.Client, echo: bool) -> None:
    """B007: max_tokens 0 with and without echo and logprobs, streamed or not."""
    body = {"prompt": "Your answer: Yes", "echo": echo, "max_tokens": 0, "logprobs": 1}
    whole = http.post(COMPLETIONS, json=body).json()
    choice = whole["choices"][0]
    assert choice["text"] == ("Your answer: Yes" if echo else "") and choice["finish_reason"] == "length"
    assert whole["usage"]["completion_tokens"] == 0
    assert choice["logprobs"]["token_logprobs"][:1] == ([None] if echo else [])
    assert len(choice["logprobs"]["tokens"]) == (16 if echo else 0)
    assert text_of(stream(http, COMPLETIONS, **body)) == choice["text"]


def test_many_tokens_per_step(preparer: Preparer) -> None:
    """Text, reasons and counts do not depend on how many tokens a step brings."""
    answers = set()
    for per_step in (1, 3, 100):
        with live_client(lambda per=per_step: ScriptedEngine(saying(REPLY), per_step=per), preparer) as (_own, http):  # type: ignore[misc]
            chunks = stream(http, CHAT, messages=HELLO, stop=["mor"], stream_options={"include_usage": True})
            answers.add(
                (text_of(chunks), chunks[-1]["usage"]["completion_tokens"], chunks[-2]["choices"][0]["stop_reason"])
            )
    assert len(answers) == 1


def test_keep_alive(preparer: Preparer) -> None:
    """D46: comments during a silence, also before the first token, and none otherwise."""
    config = ServerConfig(port=0, sse_keep_alive_interval=0.05)
    with live_client(lambda: ScriptedEngine(saying("abc"), delay=0.5, step_seconds=0.01), preparer, config) as (
        _own,
        http,
    ):
        raw = http.post(CHAT, json={"messages": HELLO, "stream": True}).content
        assert raw.startswith(b": keep-alive\n\n") and raw.count(b": keep-alive") >= 3
        assert text_of(chunks_of(raw)) == "abc"


def test_plain_frames_are_what_the_schema_encodes(http: httpx.Client) -> None:
    """The spliced frames of the hot path equal the frames that carry more, but for what was asked for."""
    odd = 'q"\\\n\t\u2028é🙂\x00'
    for path in (CHAT, COMPLETIONS):
        fast = stream(http, path, **BASE[path], stop=[odd])
        slow = stream(http, path, **BASE[path], stop=[odd], return_token_ids=True)
        for chunk in slow:
            chunk.pop("prompt_token_ids", None)
            for choice in chunk["choices"]:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
        slow = [c for c in slow if c["choices"][0].get("text") != "" or c["choices"][0]["finish_reason"]]
        strip = lambda chunks: [{k: v for k, v in c.items() if k not in ("id", "created")} for c in chunks]  # noqa: E731
        assert strip(fast) == strip(slow)


def test_characters_json_must_escape(preparer: Preparer) -> None:
    """Quotes, line ends, NUL, U+2028 and characters beyond the BMP survive the hot path."""
    odd = 'a"b\\c\nd\r\te\u2028f\x00g🙂</script>'
    with live_client(lambda: ScriptedEngine(saying(odd)), preparer) as (_own, http):
        for path in (CHAT, COMPLETIONS):
            assert text_of(stream(http, path, **BASE[path])) == odd


def test_64_streams(preparer: Preparer) -> None:
    """64 concurrent streams finish, each with its own text and one reason; B179 under concurrency."""
    with live_server(
        lambda: ScriptedEngine(lambda r, i: r.prompt_token_ids[::-1], step_seconds=0.005), preparer
    ) as own:
        texts: Counter[str] = Counter()

        async def one(client: httpx.AsyncClient, at: int) -> None:
            prompt = f"request number {at}"
            answer = await client.post(COMPLETIONS, json={"prompt": prompt, "stream": True, "max_tokens": 100})
            chunks = chunks_of(answer.content)
            assert text_of(chunks) == prompt[::-1]
            assert [c["choices"][0]["finish_reason"] for c in chunks].count("stop") == 1
            texts[text_of(chunks)] += 1

        async def all_of_them() -> None:
            limits = httpx.Limits(max_connections=64)
            async with httpx.AsyncClient(base_url=own.url, timeout=60, limits=limits, verify=False) as client:
                await asyncio.gather(*(one(client, at) for at in range(64)))

        asyncio.run(all_of_them())
        assert len(texts) == 64 and own.engine.num_running == 0


def test_health_stays_quick(server: LiveServer, http: httpx.Client) -> None:
    """B008, B017: while long prompts are rendered and tokenized, /health is answered."""
    import threading

    big = [{"role": "user", "content": "word " * 100_000}]
    threads = [
        threading.Thread(target=lambda: httpx.post(server.url + CHAT, json={"messages": big}, timeout=60))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    worst = 0.0
    with httpx.Client(base_url=server.url, verify=False) as probe:
        while any(thread.is_alive() for thread in threads):
            began = time.monotonic()
            assert probe.get("/health").status_code == 200
            worst = max(worst, time.monotonic() - began)
            time.sleep(0.01)
    print(f"worst /health latency {worst:.3f} s")
    assert worst < 5.0
