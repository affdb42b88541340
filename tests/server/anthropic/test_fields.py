"""One bad value for each field, errors raised before any endpoint, streams that fail or wait: all in Anthropic's form."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import pytest

from samovar.config.groups import SchedulerConfig, ServerConfig
from samovar.server.anthropic.schema import CountTokensRequest, MessagesRequest
from samovar.text.prepare import Preparer
from tests.server.anthropic.conftest import Stage
from tests.server.anthropic.wire import BASE, COUNT, HELLO, MESSAGES, error_of, events_of, joined, stream, whole
from tests.server.live import live_client
from tests.server.scripted_engine import ScriptedEngine, encode, engine_facts, saying

TOOL = {"name": "f", "input_schema": {"type": "object"}}

GOOD: dict[str, Any] = {
    "model": "tiny", "messages": HELLO, "system": "s", "tools": [TOOL], "tool_choice": {"type": "auto"},
    "thinking": {"type": "disabled"}, "output_config": {"effort": "low"}, "max_tokens": 5,
    "output_format": {"type": "json_schema", "schema": {"type": "object"}}, "cache_control": {"type": "ephemeral"},
    "mcp_servers": [], "context_management": {"edits": []}, "compaction": {"x": 1}, "betas": ["b"], "anthropic_beta": ["b"],
    "billing_policy": {"x": 1}, "speed": "fast", "user_profile_id": "u", "workspace_id": "w", "stream": False,
    "stop_sequences": ["x"], "temperature": 1, "top_p": 0.5, "top_k": 0, "metadata": {"user_id": "u"},
    "service_tier": "standard_only", "container": None, "thread": None, "inference_geo": "eu", "diagnostics": {},
    "fallbacks": [{"model": "x"}], "fallback_credit_token": "x",
}  # fmt: skip
BAD: dict[str, Any] = {
    "model": "", "messages": [], "system": 5, "tools": [{"name": "no schema"}], "tool_choice": {"type": "perhaps"},
    "thinking": {"type": "enabled", "budget_tokens": 1023}, "output_config": {"effort": "most"}, "max_tokens": -1,
    "output_format": {"type": "xml"}, "cache_control": {"type": "eternal"}, "mcp_servers": [{"url": "http://x"}],
    "context_management": 5, "compaction": 5, "betas": "b", "anthropic_beta": 5, "speed": "slow", "user_profile_id": 5,
    "workspace_id": 5, "stream": "yes", "stop_sequences": [""], "temperature": 1.01, "top_p": 0, "top_k": -1,
    "metadata": {"user_id": 5}, "service_tier": "cheap", "container": "c", "thread": {"id": "t"}, "inference_geo": 5,
    "diagnostics": 5,
}  # fmt: skip
OPEN = {"billing_policy", "fallbacks", "fallback_credit_token"}
"""Skipped whatever they hold."""


def test_every_field_is_here() -> None:
    """The two tables above have every field."""
    assert set(GOOD) == set(MessagesRequest.__struct_fields__) == set(BAD) | OPEN


@pytest.mark.parametrize("field", GOOD)
def test_good_value(stage: Stage, field: str) -> None:
    """No field that clients send is refused, on both endpoints."""
    assert stage.http.post(MESSAGES, json=BASE | {field: GOOD[field]}).status_code == 200
    if field in CountTokensRequest.__struct_fields__:
        body = {"model": "tiny", "messages": HELLO} | {field: GOOD[field]}
        assert stage.http.post(COUNT, json=body).status_code == 200


@pytest.mark.parametrize("field", BAD)
def test_bad_value(stage: Stage, field: str) -> None:
    """A wrong value gives 400 and names the field, on both endpoints; the next request is served."""
    for streams in (False, True):
        answer = stage.http.post(MESSAGES, json=BASE | {"stream": streams} | {field: BAD[field]})
        assert field in error_of(answer, 400, "invalid_request_error")
    if field in CountTokensRequest.__struct_fields__ and field != "thinking":
        answer = stage.http.post(COUNT, json={"model": "tiny", "messages": HELLO} | {field: BAD[field]})
        assert field in error_of(answer, 400, "invalid_request_error")
    assert whole(stage.http)["content"]


@pytest.mark.parametrize("field", ["model", "messages", "max_tokens"])
def test_required(stage: Stage, field: str) -> None:
    """What must be given."""
    body = {name: value for name, value in BASE.items() if name != field}
    assert f"{field} is required" in error_of(stage.http.post(MESSAGES, json=body), 400, "invalid_request_error")


def test_effects(stage: Stage) -> None:
    """Each sampling field reaches the engine, under its value."""
    stage.say("abc")
    whole(stage.http, temperature=0.25, top_p=0.5, top_k=7, stop_sequences=["zz"], max_tokens=9)
    params = stage.server.engine.requests[-1].params
    assert (params.temperature, params.top_p, params.top_k, params.stop, params.max_tokens) == (0.25, 0.5, 7, ["zz"], 9)
    whole(stage.http, system="Be brief.", tools=[TOOL])
    assert "Be brief." in stage.prompt and '"name": "f"' in stage.prompt
    whole(stage.http, tools=[TOOL], tool_choice={"type": "none"})
    assert '"name": "f"' not in stage.prompt
    whole(stage.http, tools=[TOOL], tool_choice={"type": "any"})
    constraint = stage.server.engine.requests[-1].constraint
    assert constraint is not None and constraint.grammar


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("schema", [False, True])
@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("marked", [False, True])
def test_truth_table(stage: Stage, thinking: bool, schema: bool, tools: bool, marked: bool) -> None:
    """think x schema x tools x stream: reasoning, content and calls land where they belong, in both modes alike."""
    said = "<think>\nhm\n</think>\n\n" if thinking else ""
    said += '{"a": 1}' if schema else "plain"
    said += '<tool_call>\n{"name": "f", "arguments": {"b": [2]}}\n</tool_call>' if marked else ""
    stage.say(said)
    body: dict[str, Any] = {"max_tokens": 3000}
    if thinking:
        body["thinking"] = {"type": "adaptive"}
    if schema:
        body["output_config"] = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    if tools:
        body["tools"] = [TOOL]
    answer = whole(stage.http, **body)
    streamed = joined(stream(stage.http, **body))
    for one in (answer, streamed):
        one.pop("id")
        for block in one["content"]:
            if block["type"] == "tool_use":
                block.pop("id")
    assert answer == streamed
    kinds = [block["type"] for block in answer["content"]]
    assert kinds == ["thinking"] * thinking + ["text"] + ["tool_use"] * (tools and marked)
    texts = "".join(block["text"] for block in answer["content"] if block["type"] == "text")
    assert ("<tool_call>" in texts) == (marked and not tools) and "think" not in texts
    assert texts.strip().startswith('{"a": 1}' if schema else "plain")
    assert answer["stop_reason"] == ("tool_use" if tools and marked else "end_turn")
    if tools and marked:
        assert answer["content"][-1]["input"] == {"b": [2]}


def test_errors_before_the_endpoint(agent_preparer: Preparer) -> None:
    """D40: wrong key, path, method, type, JSON, size: the same shape, with Anthropic's types."""
    config = ServerConfig(port=0, api_key=["secret"], max_body_bytes=4096)
    with live_client(lambda: ScriptedEngine(saying("x")), agent_preparer, config) as (_, http):
        error_of(http.post(MESSAGES, json=BASE), 401, "authentication_error")
        error_of(http.post(COUNT, json=BASE, headers={"x-api-key": "wrong"}), 401, "authentication_error")
        http.headers["x-api-key"] = "secret"
        assert http.post(MESSAGES, json=BASE).status_code == 200
        error_of(http.get(MESSAGES), 405, "invalid_request_error")
        error_of(http.post(MESSAGES + "/batches", json={}), 404, "not_found_error")
        error_of(http.post(MESSAGES, content=b"{}"), 400, "invalid_request_error")
        json_type = {"content-type": "application/json"}
        for raw in (b"", b"{", b"[]", b"5", b'{"model": "\xff"}', b"[" * 2000):
            error_of(http.post(MESSAGES, content=raw, headers=json_type), 400, "invalid_request_error")
        error_of(http.post(MESSAGES, json=BASE | {"system": "x" * 5000}), 413, "request_too_large")
        sdk = anthropic.Anthropic(base_url=str(http.base_url), api_key="wrong", max_retries=0)
        with pytest.raises(anthropic.AuthenticationError), sdk:
            sdk.messages.create(model="tiny", max_tokens=5, messages=HELLO)


def test_overload_and_death(agent_preparer: Preparer) -> None:
    """Full queues and a dead engine are overloaded_error with 503, which clients retry."""
    limits = SchedulerConfig(max_num_seqs=1, max_num_queued_reqs=1)
    make = lambda: ScriptedEngine(saying("x" * 300), step_seconds=0.05, limits=limits)  # noqa: E731
    with live_client(make, agent_preparer) as (server, http), ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(http.post, MESSAGES, json=BASE) for _ in range(4)]
        _until(lambda: any(call.done() for call in calls))
        answer = next(call for call in calls if call.done()).result()
        error_of(answer, 503, "overloaded_error")
        assert answer.headers["retry-after"]
        server.on_loop(server.engine.die)
        error_of(http.post(MESSAGES, json=BASE), 503, "overloaded_error")


@pytest.mark.parametrize("streams", [False, True])
def test_failure_within_an_answer(agent_preparer: Preparer, streams: bool) -> None:
    """A choice that fails is an error: plain where nothing was said, else the stream's last event."""
    make = lambda: ScriptedEngine(lambda r, i: [*encode("Hel"), -1])  # noqa: E731
    with live_client(make, agent_preparer) as (server, http):
        answer = http.post(MESSAGES, json=BASE | {"stream": streams})
        if not streams:
            error_of(answer, 500, "api_error")
            return
        events = events_of(answer.content)
        assert events[-1]["type"] == "error" and events[-1]["error"]["type"] == "api_error"
        assert [e["type"] for e in events[:2]] == ["message_start", "content_block_start"]
        sdk = anthropic.Anthropic(base_url=server.url, api_key="x", max_retries=0)
        with pytest.raises(anthropic.APIStatusError), sdk, sdk.messages.stream(**BASE) as stream_events:
            stream_events.get_final_message()


def test_pings_while_the_prompt_is_read(agent_preparer: Preparer) -> None:
    """A long silence: the message starts with its whole prompt as input, pings follow, the end has the real counts."""
    config = ServerConfig(port=0, sse_keep_alive_interval=0.05)

    def make() -> ScriptedEngine:
        engine = ScriptedEngine(saying("late"), delay=0.4, step_seconds=0.02)
        engine.cached = 16
        return engine

    with live_client(make, agent_preparer, config) as (server, http):
        events = stream(http)
        kinds = [event["type"] for event in events]
        assert kinds[0] == "message_start" and kinds[1:4] == ["ping"] * 3
        length = len(server.engine.requests[-1].prompt_token_ids)
        start, end = events[0]["message"]["usage"], events[-2]["usage"]
        assert (start["input_tokens"], start["cache_read_input_tokens"]) == (length, 0)
        assert (end["input_tokens"], end["cache_read_input_tokens"]) == (length - 16, 16)
        assert joined([e for e in events if e["type"] != "ping"])["content"][0]["text"] == "late"


def test_cached_tokens_can_be_kept_secret(agent_preparer: Preparer) -> None:
    """--no-enable-prompt-tokens-details: every prompt token counts as read anew, whichever API is asked."""
    config = ServerConfig(port=0, enable_prompt_tokens_details=False)

    def make() -> ScriptedEngine:
        engine = ScriptedEngine(saying("x"))
        engine.cached = 16
        return engine

    with live_client(make, agent_preparer, config) as (server, http):
        usage = whole(http)["usage"]
        assert usage["cache_read_input_tokens"] == 0
        assert usage["input_tokens"] == len(server.engine.requests[-1].prompt_token_ids)
        response = http.post("/v1/responses", json={"input": "hi"}).json()
        assert response["usage"]["input_tokens_details"]["cached_tokens"] == 0
        chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]}).json()
        assert "prompt_tokens_details" not in chat["usage"]


def test_keys_do_not_share_lines(agent_preparer: Preparer) -> None:
    """What changed in one user's system prompt moves nothing in another one's."""
    config = ServerConfig(port=0, api_key=["one", "two"])
    rules = "\n".join(f"Rule {i}: be careful with the files of this project." for i in range(100))
    facts = engine_facts(max_model_len=20_000)
    with live_client(lambda: ScriptedEngine(saying("x"), info=facts), agent_preparer, config) as (server, http):
        lengths = {}
        for turn, (key, mood) in enumerate(
            [("one", "good"), ("two", "bad"), ("two", "bad"), ("one", "bad"), ("one", "sad")]
        ):
            answer = http.post(MESSAGES, json=BASE | {"system": f"Mood is {mood}\n{rules}"}, headers={"x-api-key": key})
            assert answer.status_code == 200
            lengths[turn] = len(server.engine.requests[-1].prompt_token_ids)
        # A line that moves comes with an introduction.
        assert lengths[1] == lengths[2] == lengths[0] - 1 and lengths[3] == lengths[4] > lengths[0] + 20


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_client_that_leaves_ends_its_request(agent_preparer: Preparer) -> None:
    """The engine hears of it; others go on."""
    make = lambda: ScriptedEngine(saying("x" * 300), step_seconds=0.02)  # noqa: E731
    with live_client(make, agent_preparer) as (server, http):
        with http.stream("POST", MESSAGES, json=BASE | {"stream": True}) as answer:
            next(answer.iter_bytes())
        _until(lambda: len(server.engine.aborts) == 1 and server.engine.num_running == 0)
        assert http.get("/health").status_code == 200


def test_stream_interval(agent_preparer: Preparer) -> None:
    """Tokens per chunk, as the operator set them: fewer events, the same message."""
    with live_client(lambda: ScriptedEngine(saying("abcdefghij" * 4)), agent_preparer) as (server, http):
        every = stream(http)
        server.state.stream_interval = 8
        fewer = stream(http)
        assert joined(every)["content"] == joined(fewer)["content"] and len(fewer) < len(every) / 3


def test_concurrent_streams(stage: Stage) -> None:
    """Interleaved requests keep their own indexes and ids."""
    with httpx.Client(base_url=stage.server.url, timeout=30) as other:
        with (
            stage.http.stream("POST", MESSAGES, json=BASE | {"stream": True}) as one,
            other.stream("POST", MESSAGES, json=BASE | {"stream": True}) as two,
        ):
            messages = [joined(events_of(answer.read())) for answer in (one, two)]
    assert messages[0]["id"] != messages[1]["id"] and messages[0]["content"] == messages[1]["content"]
