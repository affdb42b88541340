"""What the server says to broken, hostile and random requests: one shape, the right code, and it lives on."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from samovar.config.groups import SchedulerConfig, ServerConfig
from samovar.server.openai.refusals import CHAT as REFUSED
from samovar.server.openai.schema import ChatCompletionRequest, CompletionRequest
from samovar.text import template_budget
from samovar.text.prepare import Preparer
from tests.server.conftest import REPLY
from tests.server.live import LiveServer, live_client, live_server
from tests.server.scripted_engine import ScriptedEngine, saying
from tests.server.wire import CHAT, COMPLETIONS, HELLO, chunks_of, error_of, raw_request


@pytest.fixture(autouse=True)
def still_alive(http: httpx.Client, server: LiveServer) -> Iterator[None]:
    """ALIVE: after each hostile call a plain request is answered, and nothing is left running."""
    yield
    answer = http.post(CHAT, json={"messages": HELLO})
    assert answer.json()["choices"][0]["message"]["content"] == REPLY
    assert http.get("/ready").status_code == 200
    assert server.engine.num_running == 0


TABLE: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("POST", CHAT, {"json": {}}, 400, "BadRequestError"),
    ("POST", CHAT, {"json": []}, 400, "BadRequestError"),
    ("POST", CHAT, {"json": "x"}, 400, "BadRequestError"),
    ("POST", CHAT, {"json": {"messages": HELLO, "model": "other"}}, 404, "NotFoundError"),
    ("GET", "/v1/models/other", {}, 404, "NotFoundError"),
    ("GET", "/nothing", {}, 404, "NotFoundError"),
    ("POST", "/v1/embeddings", {"json": {}}, 404, "NotFoundError"),
    ("GET", CHAT, {}, 405, "MethodNotAllowedError"),
    ("DELETE", "/health", {}, 405, "MethodNotAllowedError"),
    ("POST", CHAT, {"content": b"{}", "headers": {"content-type": "text/plain"}}, 400, "BadRequestError"),
    ("POST", CHAT, {"data": {"a": "b"}}, 400, "BadRequestError"),
    ("POST", CHAT, {"content": b"{}"}, 400, "BadRequestError"),
    ("POST", "/detokenize", {"json": {"tokens": [5000]}}, 400, "BadRequestError"),
    ("POST", "/tokenize", {"json": {}}, 400, "BadRequestError"),
    ("POST", "/tokenize", {"json": {"prompt": "a", "messages": HELLO}}, 400, "BadRequestError"),
]


@pytest.mark.parametrize(("method", "path", "more", "status", "kind"), TABLE)
def test_table(http: httpx.Client, method: str, path: str, more: dict[str, Any], status: int, kind: str) -> None:
    """D37, D38, D45: code and type of each class of error."""
    answer = http.request(method, path, **more)
    assert (answer.status_code, error_of(answer)["type"]) == (status, kind)


BROKEN = {
    "empty": b"",
    "not json": b"{messages}",
    "truncated": b'{"messages": [{"role": "user", "content": "hi',
    "trailing": b'{"messages": [{"role":"user","content":"x"}]} x',
    "0xff": b'{"messages": [{"role": "user", "content": "\xff"}]}',
    "overlong": b'{"messages": [{"role": "user", "content": "\xc0\x80"}]}',
    "cut utf-8": b'{"messages": [{"role": "user", "content": "\xe2\x82"}]}',
    "gbk": '{"messages": [{"role": "user", "content": "你好"}]}'.encode("gbk"),
    "utf-16": '{"messages": [{"role": "user", "content": "hi"}]}'.encode("utf-16"),
    "bad bytes in an unknown field": b'{"messages": [{"role": "user", "content": "x"}], "q": "\xff"}',
    "lone surrogate": b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "surrogate in a key": b'{"messages": [{"role": "user", "content": "x"}], "\\udfff": 1}',
    "deep arrays": b'{"messages": ' + b"[" * 200_000 + b"]" * 200_000 + b"}",
    "deep objects in an unknown field": b'{"q": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    "deep template kwargs": b'{"messages": [{"role":"user","content":"x"}], "chat_template_kwargs": '
    + b'{"a":' * 50_000 + b"1" + b"}" * 50_001,
    "nan": b'{"messages": [{"role":"user","content":"x"}], "temperature": NaN}',
    "infinity": b'{"messages": [{"role":"user","content":"x"}], "temperature": Infinity}',
    "1e999": b'{"messages": [{"role":"user","content":"x"}], "temperature": 1e999}',
    "-1e999": b'{"messages": [{"role":"user","content":"x"}], "logit_bias": {"5": -1e999}}',
    "long integer": b'{"messages": [{"role":"user","content":"x"}], "seed": ' + b"9" * 10_000 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_bodies(server: LiveServer, name: str) -> None:
    """B025: bytes that are not UTF-8, not JSON, too deep or not finite are a short 400."""
    status, body = raw_request(server, BROKEN[name])
    assert status == 400 and len(body) < 2000, body[:500]
    error = json.loads(body)["error"]
    if "0xff" in name or "gbk" in name:
        assert "UTF-8" in error["message"]


def test_moderately_deep_bodies_are_fine_or_refused(http: httpx.Client) -> None:
    """Every depth up to the refusal is answered: no depth at which a later stage recurses too far."""
    for depth in (10, 100, 300, 600, 900, 1500):
        value: Any = 1
        for _ in range(depth):
            value = {"a": value}
        raw = (
            '{"messages":[{"role":"user","content":"x"}],"chat_template_kwargs":'
            + '{"a":' * depth
            + "1"
            + "}" * depth
            + "}"
        )
        answer = http.post(CHAT, content=raw, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400), (depth, answer.text)


def test_huge_values_give_short_errors(http: httpx.Client) -> None:
    """D39: a message never repeats a large input."""
    big = "y" * 3_000_000
    for body in (
        {"messages": HELLO, "model": big},
        {"messages": HELLO, "stop": [big]},
        {"messages": HELLO, "stop": big},
        {"messages": [{"role": big, "content": "x"}]},
        {"messages": HELLO, "bad_words": [""] + [big]},
        {"messages": HELLO, "logit_bias": {big: 1}},
        {"messages": HELLO, "reasoning_effort": big},
        {"messages": HELLO, "chat_template_kwargs": {"-" + big: 1}},
        {"messages": HELLO, "stop_token_ids": list(range(300_000))},
    ):
        error_of(http.post(CHAT, json=body))


FIELDS = sorted({*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__, *REFUSED, "unknown"})
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30) | st.sampled_from(["none", "auto", "user", "\0", "é" * 50, "<|im_end|>"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
PLAUSIBLE = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(-1, 3), "max_tokens": st.integers(-1, 20), "temperature": st.floats(-1, 3), "top_p": st.floats(-1, 2),
        "stream": st.booleans(), "logprobs": st.booleans() | st.integers(-1, 25), "echo": st.booleans(), "stop": st.text(max_size=3),
        "top_logprobs": st.integers(-1, 25), "min_tokens": st.integers(-1, 30), "prompt_logprobs": st.integers(-1, 25),
        "return_token_ids": st.booleans(), "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
        "truncate_prompt_tokens": st.integers(-2, 40), "continue_final_message": st.booleans(), "stream_interval": st.integers(0, 5),
        "add_generation_prompt": st.booleans(),
    },
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    path=st.sampled_from([CHAT, COMPLETIONS, "/tokenize", "/detokenize"]),
    plausible=PLAUSIBLE,
    odd=st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=2),
    content=st.text(max_size=20),
    keep=st.booleans(),
)
def test_random_bodies(
    http: httpx.Client, path: str, plausible: dict[str, Any], odd: dict[str, Any], content: str, keep: bool
) -> None:
    """B023, D39: 300 random bodies: an answer, or a 4xx of less than 20 KB that has the one error shape."""
    content = content.encode("utf-8", "replace").decode()
    needed = {"messages": [{"role": "user", "content": content}]} if path == CHAT else {"prompt": content or "x"}
    body = needed | plausible | odd if keep else plausible | odd
    raw = json.dumps(body).encode()
    answer = http.post(path, content=raw, headers={"content-type": "application/json"})
    assert answer.status_code in (200, 400, 404), (answer.text, body)
    if answer.status_code != 200:
        error_of(answer)
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert not any("error" in chunk for chunk in chunks_of(answer.content))


def test_failed_choice(preparer: Preparer) -> None:
    """A row the engine gives up is a 500 for its caller, an error frame in a stream; other requests go on."""
    with (
        live_server(
            lambda: ScriptedEngine(lambda r, i: [1, 2, -1, 3] if r.params.seed == 1 else [1, 2, 3]), preparer
        ) as own,
        httpx.Client(base_url=own.url, verify=False) as http,
    ):
        failed = http.post(CHAT, json={"messages": HELLO, "seed": 1})
        assert error_of(failed)["type"] == "InternalServerError" and "row failed" in failed.text
        chunks = chunks_of(http.post(CHAT, json={"messages": HELLO, "seed": 1, "stream": True}).content)
        assert chunks[-1]["error"]["code"] == 500 and "choices" in chunks[0]
        assert http.post(CHAT, json={"messages": HELLO}).status_code == 200


def test_overload(preparer: Preparer) -> None:
    """A full queue is a 503 with Retry-After, before a stream begins as well; the counter has a closed reason."""
    limits = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1)
    with (
        live_client(lambda: ScriptedEngine(saying("x" * 50), step_seconds=0.02, limits=limits), preparer) as (
            own,
            http,
        ),
        httpx.Client(base_url=own.url, verify=False) as other,
    ):
        with http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as first:
            parts = first.iter_raw()
            next(parts)
            answers = []
            with other.stream("POST", COMPLETIONS, json={"prompt": ["a"] * 5, "stream": True}) as refused:
                refused.read()
                answers.append(refused)
            assert b"[DONE]" in b"".join(parts)
        assert [a.status_code for a in answers] == [503]
        assert answers[0].headers["retry-after"] and error_of(answers[0])["type"] == "ServiceUnavailableError"
        text = http.get("/metrics").text
        assert 'vllm:admission_rejections_total{model_name="tiny",reason="queue_requests"} ' in text


def test_dead_engine(preparer: Preparer) -> None:
    """The engine dies: streams end with an error frame, waiting calls and new ones get 503, /health says so."""
    with (
        live_client(lambda: ScriptedEngine(saying("x" * 200), step_seconds=0.02), preparer) as (own, http),
        httpx.Client(base_url=own.url, verify=False) as other,
    ):
        assert http.get("/health").status_code == 200
        with http.stream("POST", CHAT, json={"messages": HELLO, "stream": True}) as running:
            parts = running.iter_raw()
            received = next(parts)
            own.on_loop(own.engine.die)
            received += b"".join(parts)
        assert chunks_of(received)[-1]["error"]["code"] == 503
        assert [other.get(p).status_code for p in ("/health", "/ping", "/ready")] == [503] * 3
        assert other.get("/ready").json()["status"] == "dead"
        assert error_of(other.post(CHAT, json={"messages": HELLO}))["code"] == 503
        assert other.get("/metrics").status_code == 200


def test_no_tokenizer(preparer: Preparer) -> None:
    """Without a tokenizer, text is refused by name and token ids are served."""
    bare = Preparer(None, None, preparer.limits, [258])
    with live_client(lambda: ScriptedEngine(saying("abc")), bare, ServerConfig(port=0)) as (_own, http):
        assert error_of(http.post(COMPLETIONS, json={"prompt": "x"}))["param"] == "prompt"
        assert error_of(http.post(CHAT, json={"messages": HELLO}))["param"] == "messages"
        answer = http.post(COMPLETIONS, json={"prompt": [1, 2], "return_token_ids": True}).json()
        assert len(answer["choices"][0]["token_ids"]) == answer["usage"]["completion_tokens"] == 4
        assert error_of(http.post(COMPLETIONS, json={"prompt": [1], "echo": True}))["param"] == "echo"
        assert error_of(http.post("/tokenize", json={"prompt": "x"}))["code"] == 400


def test_a_clients_template_holds_nobody_up(preparer: Preparer, monkeypatch: pytest.MonkeyPatch) -> None:
    """B148: while templates of requests burn their whole time, other routes answer; then they are refused."""
    monkeypatch.setattr(template_budget, "MAX_SECONDS", 2.0)
    source = "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    config = ServerConfig(port=0, trust_request_chat_template=True)
    with (
        live_client(lambda: ScriptedEngine(saying("abc")), preparer, config) as (_own, client),
        ThreadPoolExecutor() as pool,
    ):
        body = {"messages": HELLO, "chat_template": source}
        burning = [pool.submit(client.post, path, json=body) for path in (CHAT, "/tokenize")]
        answered = 0
        while not all(call.done() for call in burning):
            assert client.get("/health", timeout=1.5).status_code == 200
            answered += 1
            time.sleep(0.05)
        for call in burning:
            assert call.result().status_code == 400 and "took longer" in error_of(call.result())["message"]
        assert answered > 10
        assert client.post(CHAT, json=body | {"chat_template": "{{ 1 }}"}).status_code == 200
