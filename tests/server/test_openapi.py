"""/openapi.json is true: every route is in it, answers fit it, and random requests made from it never give a 5xx."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import checks

from samovar.config.groups import ServerConfig
from samovar.server.openai.schema import ChatCompletionRequest, CompletionRequest
from samovar.server.routes import ROUTES
from samovar.text.prepare import Preparer
from tests.server.live import LiveServer, live_server
from tests.server.scripted_engine import ScriptedEngine, saying


def test_document(http: httpx.Client) -> None:
    """Every route and method is described, and every field of the chat body."""
    document = http.get("/openapi.json").json()
    described = {(path, method.upper()) for path, methods in document["paths"].items() for method in methods}
    assert described == {(route.path, route.method) for route in ROUTES}
    fields = document["components"]["schemas"]["ChatCompletionRequest"]["properties"]
    assert set(fields) == set(ChatCompletionRequest.__struct_fields__)
    seed = next(kind for kind in fields["seed"]["anyOf"] if kind["type"] == "integer")
    assert (seed["minimum"], seed["maximum"]) == (-(2**63), 2**63 - 1)


def test_page(http: httpx.Client) -> None:
    """/docs names every path and loads nothing from anywhere."""
    answer = http.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert all(route.path in answer.text for route in ROUTES)
    assert "<script" not in answer.text and "http://" not in answer.text and "https://" not in answer.text


def test_the_page_is_in_words(http: httpx.Client) -> None:
    """Types and ranges as people say them, and every object that a field holds."""
    text = html.unescape(re.sub(r"<[^>]*>", " ", http.get("/docs").text))
    lines = [
        "temperature  number, 0 to 2", "top_p  number, above 0, at most 1", "n  integer, at least 1", "seed  integer",
        'truncation_side  one of "left", "right"', "stop  string or list of strings", "logit_bias  object of numbers",
        "stop_token_ids  list of (integer, 0 to 2147483647)", "messages  (required) list of ChatMessages, not empty",
        "cache_salt  string, 1 to 1024 characters", "include_usage  boolean", "content  string or list of ContentParts",
    ]  # fmt: skip
    for line in lines:
        assert line in text, line
    assert "{" not in re.sub(r"/\{\w+\}|matching \S+", "", text).partition("Samovar 0")[2]


def test_the_root_leads_to_the_page(http: httpx.Client) -> None:
    answer = http.get("/", follow_redirects=False)
    assert answer.status_code == 307 and answer.headers["location"] == "docs"
    assert http.get("/", follow_redirects=True).url.path == "/docs"


def test_the_page_on_the_api_names_everything() -> None:
    """docs/api.md has every path and every field that OpenAI does not have."""
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text("utf-8")
    named = set(re.findall(r"`([^`\n]+)`", page))
    assert {route.path for route in ROUTES} <= named
    openai = {
        "model", "n", "stream", "stream_options", "max_tokens", "temperature", "top_p", "presence_penalty", "seed", "stop",
        "frequency_penalty", "logit_bias", "user", "messages", "max_completion_tokens", "logprobs", "top_logprobs", "prompt",
    }  # fmt: skip
    fields = {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert fields - openai <= named
    assert openai <= fields


def test_version_and_load(http: httpx.Client) -> None:
    """The small endpoints."""
    assert set(http.get("/version").json()) == {"version"}
    assert http.get("/load").json() == {"server_load": 0}
    assert http.post("/ping").status_code == 200 and http.head("/health").status_code == 200
    assert http.get("/v1/models/default").json()["id"] == "tiny"


def test_tokenize_round_trip(http: httpx.Client) -> None:
    """Tokens of a text give the text back; special tokens are shown; strings go with ids."""
    text = "Grüße\0 🙂 <|im_end|>"
    answer = http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) and answer["max_model_len"] == 512
    assert http.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def _fuzz(server: LiveServer, examples: int, headers: dict[str, str] | None = None) -> None:
    """With `headers`, only the routes of operators."""
    schema: Any = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    wanted = [
        checks.CHECKS.get_one(name)
        for name in (
            "not_a_server_error",
            "status_code_conformance",
            "content_type_conformance",
            "response_schema_conformance",
        )
    ]
    admin = {route.path for route in ROUTES if route.is_admin}
    for result in schema.get_all_operations():
        operation = result.ok()
        if headers is None or operation.path in admin:
            _run(operation.as_strategy(), wanted, examples, headers)


def _run(strategy: Any, wanted: list[Any], examples: int, headers: dict[str, str] | None) -> None:
    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @given(case=strategy)
    def attempt(case: Any) -> None:
        answer = case.call(headers=headers)
        case.validate_response(answer, checks=wanted)

    attempt()


def test_random_requests_from_the_document(server: LiveServer) -> None:
    """Schemathesis: no 5xx, no undocumented status or content type, no answer that breaks its own schema."""
    _fuzz(server, 8)


@pytest.mark.slow
def test_more_random_requests_from_the_document(server: LiveServer) -> None:
    """The same, for longer."""
    _fuzz(server, 400)


@pytest.mark.parametrize("examples", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_random_requests_of_an_operator(preparer: Preparer, examples: int) -> None:
    """The same for the admin routes, with the key that lets them through to the engine."""
    config = ServerConfig(port=0, admin_api_key=["hush-hush"])
    with live_server(lambda: ScriptedEngine(saying("x")), preparer, config) as own:
        own.engine.answers = {
            "is_sleeping": False, "is_paused": False, "wake_up": True, "reset_prefix_cache": True,
            "release_kv_cache_memory": 1, "stop_profile": "/x", "server_info": {},
        }  # fmt: skip
        _fuzz(own, examples, {"authorization": "Bearer hush-hush"})
        assert {name for name, _ in own.engine.calls} >= {"sleep", "pause", "wake_up", "start_profile", "server_info"}


WEATHER: dict[str, Any] = {
    "type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"],
}  # fmt: skip
USER = {"role": "user", "content": [{"type": "text", "text": "hi"}]}
CALL = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [USER, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "tool_call_id": "call_1", "content": "x"}],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": WEATHER, "strict": True}}],
        "tool_choice": {"type": "function", "function": {"name": "weather"}}, "parallel_tool_calls": False,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": WEATHER, "strict": True}},
        "reasoning_effort": "low", "stream": True, "stream_options": {"include_usage": True}, "logprobs": True,
        "top_logprobs": 2, "chat_template_kwargs": {"mood": "good"}, "max_completion_tokens": 9,
    },
    "/v1/completions": {
        "prompt": ["hi"], "structured_outputs": {"json": WEATHER, "disable_any_whitespace": True}, "max_tokens": 9, "n": 2,
        "logit_bias": {"70": 1}, "stop": ["x"], "seed": 1,
    },
    "/v1/responses": {
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
            {"type": "function_call", "call_id": "call_1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "rain"},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        ],
        "tools": [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}],
        "tool_choice": {"type": "function", "name": "weather"}, "text": {"format": {"type": "text"}},
        "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "max_output_tokens": 20,
    },
    "/v1/messages": {
        "model": "tiny", "max_tokens": 9, "system": [{"type": "text", "text": "be", "cache_control": {"type": "ephemeral"}}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "x"}]}]},
        ],
        "tools": [{"name": "weather", "description": "d", "input_schema": WEATHER}], "tool_choice": {"type": "any"},
        "thinking": {"type": "disabled"}, "stop_sequences": ["x"], "temperature": 0.5, "metadata": {"user_id": "u"},
    },
    "/v1/messages/count_tokens": {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "tools": [], "system": "be"},
    "/tokenize": {"messages": [USER], "tools": [], "add_generation_prompt": True},
}  # fmt: skip
"""Bodies that are served, with most of what is nested in them."""

VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, 1.5, -0.0, 1e308, "", "a", "auto", "required", "\0", "\ud800", "x" * 5000, [],
    [[]], [None], [1, "a"], {}, {"": None}, {"type": "x"}, {"type": "text"}, {"type": ["string"]}, {"$ref": "#"}, {"not": {}},
    {"a": {"b": {"c": []}}}, "call_1", "{", '{"a": 1}',
]  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of everything inside a value."""
    inner: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in inner:
        yield (*path, key)
        yield from _places(part, (*path, key))


def _changed(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    copied = json.loads(json.dumps(body))
    at = copied
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return copied


@pytest.mark.parametrize("examples", [25, pytest.param(1_500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", GOOD)
def test_a_wrong_value_anywhere(truth_http: httpx.Client, path: str, examples: int) -> None:
    """What schemathesis hardly finds: bodies that are right but for one or two places. None of them is answered 5xx."""
    body = GOOD[path]
    assert truth_http.post(path, json=body).status_code == 200, truth_http.post(path, json=body).text
    change = st.tuples(st.sampled_from(list(_places(body))), st.sampled_from(VALUES))

    @settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None
    )
    @given(first=change, second=st.one_of(st.none(), change))
    def attempt(first: tuple[Any, Any], second: tuple[Any, Any] | None) -> None:
        wrong = _changed(body, *first)
        if second is not None and second[0] in set(_places(wrong)):
            wrong = _changed(wrong, *second)
        answer = truth_http.post(path, content=json.dumps(wrong), headers={"content-type": "application/json"})
        assert answer.status_code < 500, (wrong, answer.text)
        assert "event: error" not in answer.text and '"code":500' not in answer.text, (wrong, answer.text)

    attempt()
