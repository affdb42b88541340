"""Operator's settings about answers, /tokenize with tools, keys and routing of chat, and what the start says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from samovar.config.groups import ServerConfig
from samovar.errors import ConfigError
from samovar.server.answers import formats_text
from samovar.text.chat_template import ChatTemplate
from samovar.text.formats.choose import choose
from tests.server.test_truth_chat import body_of
from tests.server.truth_table import CASES, TEMPLATE, Case, TruthServer, prompt_text, scripted_server, truth_server
from tests.server.wire import CHAT, error_of, stream


def case_of(tools: str, think: str = "on") -> Case:
    return next(
        c for c in CASES if c.tools == tools and c.think == think and not c.schema and (tools == "absent" or c.calls)
    )


def ask(server: TruthServer, body: dict[str, Any], **headers: str) -> dict[str, Any]:
    answer = httpx.post(server.live.url + CHAT, json=body, headers=headers, timeout=30)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def test_switched_off(tmp_path: Path) -> None:
    """Without automatic choice, and without the second name of reasoning."""
    config = ServerConfig(port=0, enable_auto_tool_choice=False, reasoning_content_alias=False)
    with truth_server(tmp_path, config) as server:
        case = case_of("auto")
        message = ask(server, body_of(case))["choices"][0]["message"]
        assert "tool_calls" not in message and "get_weather" in message["content"]
        assert "reasoning_content" not in message and message["reasoning"] == case.reasoning
        assert "get_weather" not in prompt_text(server.last).partition("<|im_start|>user")[0]
        required = ask(server, body_of(case_of("required")))["choices"][0]
        assert required["finish_reason"] == "tool_calls"
        with httpx.Client(base_url=server.live.url) as http:
            chunks = stream(http, CHAT, **body_of(case))
        assert not any("reasoning_content" in c["choices"][0]["delta"] for c in chunks)


def test_operators_variables(tmp_path: Path) -> None:
    """--default-chat-template-kwargs hold where neither an effort nor the request's own variables say otherwise."""
    config = ServerConfig(port=0, default_chat_template_kwargs={"enable_thinking": False})
    with truth_server(tmp_path, config) as server:
        hello = {"messages": [{"role": "user", "content": "hi"}]}
        for fields, ending in (
            ({}, "</think>\n\n"),
            ({"reasoning_effort": "low"}, "<think>\n"),
            ({"reasoning": {"enabled": True}}, "<think>\n"),
            ({"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}}, "<think>\n"),
        ):
            ask(server, hello | fields)
            assert prompt_text(server.last).endswith(ending), fields


def test_no_formats(tmp_path: Path) -> None:
    """A model whose marks are not known: nothing is told apart but calls in the format that is told in words."""
    with scripted_server(tmp_path, lambda r, i: [], formats=(None, None)) as server:
        answer = ask(server, {"messages": [{"role": "user", "content": "hi"}], "thinking_token_budget": 3})
        assert "completion_tokens_details" not in answer["usage"] and server.last.constraint is None


def test_tokenize_is_the_prompt(truth: TruthServer, truth_http: httpx.Client) -> None:
    """C15: /tokenize with tools and effort gives exactly the ids that chat sends to the engine."""
    for case in (case_of("auto"), case_of("auto", "off")):
        body = {k: v for k, v in body_of(case).items() if k != "chat_template_kwargs"}
        for effort in (None, "none", "high"):
            for choice in ("auto", "none"):
                fields = body | {"reasoning_effort": effort, "tool_choice": choice}
                ask(truth, fields)
                tokens = truth_http.post("/tokenize", json=fields).json()["tokens"]
                assert tokens == truth.last.prompt_token_ids


def test_reasoning_of_the_history(truth: TruthServer) -> None:
    """Reasoning of earlier messages reaches the template under every name."""
    for name in ("reasoning", "reasoning_content"):
        turn = {"role": "assistant", "content": "Yes.", name: "I was sure."}
        ask(truth, {"messages": [{"role": "user", "content": "hi"}, turn, {"role": "user", "content": "so?"}]})
        assert "<think>\nI was sure.\n</think>\n\nYes." in prompt_text(truth.last)


def test_logprobs_and_ids_with_calls(truth: TruthServer, truth_http: httpx.Client) -> None:
    """Every token is reported once, in the thought and in calls too, whole and streamed."""
    body = body_of(case_of("auto", "absent")) | {"logprobs": True, "top_logprobs": 1, "return_token_ids": True, "n": 2}
    whole = ask(truth, body)
    chunks = stream(truth_http, CHAT, **body)
    for index in (0, 1):
        choice = whole["choices"][index]
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        ids = [i for c in mine for i in c.get("token_ids", ())]
        entries = [e for c in mine for e in (c["logprobs"] or {"content": []})["content"]]
        assert ids == choice["token_ids"] and entries == choice["logprobs"]["content"]
        assert len(entries) == len(ids)


def test_stop_strings_in_calls(truth: TruthServer) -> None:
    """A stop string ends the answer wherever it stands; a cut call is not one that was made."""
    choice = ask(truth, body_of(case_of("required")) | {"stop": ['"Ro']})["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["stop_reason"] == '"Ro'
    arguments = [call["function"]["arguments"] for call in choice["message"].get("tool_calls", [])]
    assert all('"Ro' not in text for text in arguments)


@pytest.mark.parametrize("field", ["reasoning_effort", "tools", "thinking_token_budget", "response_format"])
def test_null_is_absent(truth: TruthServer, field: str) -> None:
    """null asks for nothing."""
    assert ask(truth, {"messages": [{"role": "user", "content": "hi"}], field: None})["choices"]


def test_limits_on_tools(truth: TruthServer, truth_http: httpx.Client) -> None:
    """Too many, too large, too deep: refused by name."""
    hello = [{"role": "user", "content": "hi"}]
    deep: Any = {"type": "object"}
    for _ in range(80):
        deep = {"type": "object", "properties": {"x": deep}}
    for functions in (
        [{"name": f"f{i}"} for i in range(1025)],
        [{"name": "f", "description": "x" * 5_000_000}],
        [{"name": "f", "parameters": deep}],
    ):
        tools = [{"type": "function", "function": f} for f in functions]
        assert error_of(truth_http.post(CHAT, json={"messages": hello, "tools": tools}))["param"].startswith("tools")


def test_what_the_start_says() -> None:
    """The line names the formats and why they were chosen; a name nobody knows stops the start."""
    template = ChatTemplate({"default": TEMPLATE})
    assert formats_text(None, (None, None), ServerConfig()).startswith("no chat template")
    line = formats_text(template, choose([TEMPLATE]), ServerConfig())
    assert "hermes (as the chat template shows)" in line and "reasoning: think" in line
    named = ServerConfig(tool_call_parser="mistral", reasoning_parser="none", enable_auto_tool_choice=False)
    line = formats_text(template, choose([TEMPLATE], "mistral", "none"), named)
    assert "mistral (as set), only where a request requires them; reasoning: none" in line
    bare = ChatTemplate({"default": "{{ messages }}"})
    assert "system message" in formats_text(bare, (None, None), ServerConfig())
    with pytest.raises(ConfigError, match="hermes"):
        choose([TEMPLATE], "no_such_format")


def test_usage_on_every_chunk(truth: TruthServer, truth_http: httpx.Client) -> None:
    """D34: continuous usage grows with thoughts and calls, and ends at the whole answer's."""
    body = body_of(case_of("auto"))
    chunks = stream(truth_http, CHAT, **body, stream_options={"include_usage": True, "continuous_usage_stats": True})
    counts = [c["usage"]["completion_tokens_details"]["reasoning_tokens"] for c in chunks if c.get("usage")]
    assert (
        counts == sorted(counts)
        and counts[-1] == ask(truth, body)["usage"]["completion_tokens_details"]["reasoning_tokens"]
    )
    assert json.dumps(chunks[-1]["usage"])
