"""The truth table for chat completions: thoughts, content and calls land where they belong, whole and streamed."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.server.truth_table import CASES, SCHEMA, TOOLS, Case, TruthServer, check_constraint, encode_marked
from tests.server.wire import CHAT, stream

CHOICES: dict[str, Any] = {
    "none": "none", "auto": "auto", "required": "required",
    "named": {"type": "function", "function": {"name": TOOLS[0][0]}},
}  # fmt: skip


def body_of(case: Case) -> dict[str, Any]:
    """The chat request of a case."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": case.question}]}
    if case.think != "absent":
        body["chat_template_kwargs"] = {"enable_thinking": case.think == "on"}
    if case.schema:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
    if case.tools != "absent":
        functions = [{"name": n, "description": d, "parameters": p} for n, d, p in TOOLS]
        body |= {"tools": [{"type": "function", "function": f} for f in functions], "tool_choice": CHOICES[case.tools]}
    return body


def check_message(case: Case, message: dict[str, Any], finish_reason: str) -> None:
    assert message.get("reasoning", "") == message.get("reasoning_content", "") == case.reasoning
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    assert calls == list(case.calls)
    assert all(c["type"] == "function" and c["id"].startswith("call_") for c in message.get("tool_calls") or ())
    assert message["content"] == (case.text or (None if calls else ""))
    assert finish_reason == {"calls": "tool_calls", "stop": "stop"}[case.ending]


def accumulated(chunks: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
    """The message and finish reason that the chunks of one choice add up to; checks each chunk's form (D31 to D33)."""
    message: dict[str, Any] = {"content": None}
    finish = None
    for at, chunk in enumerate(chunks):
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        assert finish is None, "a chunk after the last"
        finish = choice["finish_reason"]
        assert finish != ""
        assert delta or finish, "an empty chunk"
        assert ("role" in delta) == (at == 0)
        for name in ("reasoning", "reasoning_content"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        if delta.get("content"):
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", ()):
            calls = message.setdefault("tool_calls", [])
            if call["index"] == len(calls):
                assert call["id"] and call["type"] == "function" and call["function"]["name"]
                calls.append({**call, "function": dict(call["function"])})
            else:
                assert call["index"] == len(calls) - 1 and call.keys() == {"index", "function"}
                assert call["function"].keys() == {"arguments"} and call["function"]["arguments"]
                calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    assert finish is not None, "B179: no finish reason"
    if message["content"] is None and not message.get("tool_calls"):
        message["content"] = ""
    return message, finish


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chat(truth: TruthServer, truth_http: httpx.Client, case: Case) -> None:
    """B124, B133, B137, B139, B140, B143: think x schema x tools, whole."""
    answer = truth_http.post(CHAT, json=body_of(case))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    check_message(case, choice["message"], choice["finish_reason"])
    check_constraint(case, truth.last)
    usage = answer.json()["usage"]
    thought = usage["completion_tokens_details"]["reasoning_tokens"]
    assert (thought > 0) == bool(case.reasoning) and thought <= usage["completion_tokens"]
    assert thought >= len(case.reasoning)  # a token a byte


@pytest.mark.parametrize("case", CASES, ids=str)
def test_chat_stream(truth: TruthServer, truth_http: httpx.Client, case: Case) -> None:
    """B122, B145, B178, B179: the same, streamed, with usage that equals the whole answer's."""
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = stream(truth_http, CHAT, **body_of(case), **options)
    check_message(case, *accumulated(chunks))
    assert last["choices"] == []
    whole = truth_http.post(CHAT, json=body_of(case)).json()
    for usage in (last["usage"], whole["usage"]):
        usage.pop("prompt_tokens_details")
    assert last["usage"] == whole["usage"]


@pytest.mark.parametrize("interval", [2, 7, 1000])
def test_interval_keeps_order(truth: TruthServer, truth_http: httpx.Client, interval: int) -> None:
    """Joined chunks say the same as single ones."""
    for case in CASES:
        if case.think == "absent" and case.tools == "auto":
            check_message(case, *accumulated(stream(truth_http, CHAT, **body_of(case), stream_interval=interval)))


@pytest.mark.parametrize("streams", [False, True])
def test_hidden_reasoning(truth: TruthServer, truth_http: httpx.Client, streams: bool) -> None:
    """D9: include_reasoning false, or reasoning.exclude, keeps the thought back and counts it all the same."""
    case = next(c for c in CASES if c.think == "on" and c.tools == "auto" and c.calls and not c.schema)
    for hide in ({"include_reasoning": False}, {"reasoning": {"exclude": True}}):
        if streams:
            message, finish = accumulated(stream(truth_http, CHAT, **body_of(case), **hide))
        else:
            answer = truth_http.post(CHAT, json=body_of(case) | hide).json()
            message, finish = answer["choices"][0]["message"], answer["choices"][0]["finish_reason"]
            assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert "reasoning" not in message and "reasoning_content" not in message
        assert [c["function"]["arguments"] for c in message["tool_calls"]] == [c[1] for c in case.calls]
        assert finish == "tool_calls"


def test_cut_answers(truth: TruthServer, truth_http: httpx.Client) -> None:
    """B131: wherever max_tokens cuts, both modes say length, and what was there before is the same."""
    case = next(c for c in CASES if c.think == "absent" and c.tools == "required" and not c.schema)
    size = len(encode_marked(case.says))
    for most in range(1, 170, 7):
        body = body_of(case) | {"max_tokens": most}
        whole = truth_http.post(CHAT, json=body).json()["choices"][0]
        message, finish = accumulated(stream(truth_http, CHAT, **body))
        assert whole["finish_reason"] == finish
        assert (finish == "length") == (most < size)
        for one in (whole["message"], message):
            for call in one.get("tool_calls") or ():
                call.pop("id"), call.pop("index", None)
        assert {k: v for k, v in whole["message"].items() if k in message} == message
        complete = [c for c in whole["message"].get("tool_calls") or () if _is_json(c["function"]["arguments"])]
        assert len(complete) <= len(case.calls)


def _is_json(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
