"""One effect and one bad value for every field of /v1/responses; what is skipped is noticed, what is refused is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from samovar.config.groups import ServerConfig
from samovar.server.responses.refusals import REFUSED, SKIPPED
from samovar.server.responses.schema import ResponseObject, ResponseRequest
from samovar.text.prepare import Preparer
from tests.server.responses.conftest import PATH, Talker, talking
from tests.server.truth_table import MAX_LEN, SCHEMA, TOOLS

FUNCTIONS = [{"type": "function", "name": n, "description": d, "parameters": p} for n, d, p in TOOLS]
PARAMS: dict[str, tuple[Any, str, Any]] = {
    "temperature": (0.25, "temperature", 0.25),
    "top_p": (0.5, "top_p", 0.5),
    "top_k": (7, "top_k", 7),
    "min_p": (0.125, "min_p", 0.125),
    "presence_penalty": (0.5, "presence_penalty", 0.5),
    "frequency_penalty": (0.5, "frequency_penalty", 0.5),
    "repetition_penalty": (1.5, "repetition_penalty", 1.5),
    "seed": (11, "seed", 11),
    "stop": (["q"], "stop", ["q"]),
    "stop_token_ids": ([3], "stop_token_ids", [3]),
    "include_stop_str_in_output": (True, "include_stop_str_in_output", True),
    "ignore_eos": (True, "ignore_eos", True),
    "min_tokens": (3, "min_tokens", 3),
    "skip_special_tokens": (False, "skip_special_tokens", False),
    "spaces_between_special_tokens": (False, "spaces_between_special_tokens", False),
    "bad_words": (["zz"], "bad_words", ["zz"]),
    "allowed_token_ids": ([1, 2], "allowed_token_ids", [1, 2]),
    "logit_bias": ({"4": 2.0}, "logit_bias", {4: 2.0}),
    "max_output_tokens": (9, "max_tokens", 9),
    "thinking_token_budget": (64, "thinking_token_budget", 64),
}
"""Field -> (value, the engine's name, what must arrive there)."""

ECHOED: dict[str, Any] = {
    "instructions": "Be kind.", "metadata": {"a": "b"}, "user": "u", "safety_identifier": "s", "prompt_cache_key": "k",
    "max_tool_calls": 3, "parallel_tool_calls": False, "truncation": "auto", "max_output_tokens": 9, "store": False,
    "tools": FUNCTIONS, "tool_choice": "none",
}  # fmt: skip

BAD: dict[str, list[Any]] = {
    "input": [None, 3, [], [3], {"role": "user"}],
    "model": [3],
    "instructions": [3, ["a"]],
    "previous_response_id": [3],
    "stream": ["yes"],
    "stream_options": [{}, {"include_obfuscation": 1}],
    "store": ["yes"],
    "background": ["yes"],
    "tools": [{}, [3], [{"name": "f"}], [{"type": "function"}], [{"type": "function", "name": "a b"}],
              [{"type": "function", "name": "f", "parameters": []}], [FUNCTIONS[0], FUNCTIONS[0]],
              [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "yacc", "definition": "x"}}],
              [{"type": "custom", "name": "c", "format": {"type": "xml"}}],
              [{"type": "namespace", "name": "n", "tools": [{"type": "namespace", "name": "m", "tools": []}]}]],
    "tool_choice": ["always", "required", {"type": "function", "name": "f"}, {"type": "web_search_preview"},
                    {"type": "mcp", "server_label": "x"}, {"type": "custom", "name": "f"}, {"type": "allowed_tools"},
                    {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "f"}]}],
    "parallel_tool_calls": [1],
    "max_tool_calls": [0, "1"],
    "text": [3, {"format": {"type": "xml"}}, {"format": {"type": "json_schema", "name": "x"}}, {"verbosity": "loud"}],
    "reasoning": ["high", {"effort": "huge"}, {"summary": "long"}],
    "include": ["x", ["everything"]],
    "max_output_tokens": [0, -1, 1.5],
    "temperature": [-1, 2.5, "hot"],
    "top_p": [0, 1.1],
    "top_logprobs": [-1, 3, "2"],
    "truncation": ["middle"],
    "metadata": [{"a": 3}, {"a" * 65: "x"}, {"a": "x" * 513}, {str(i): "x" for i in range(17)}, []],
    "user": [3, "x" * 2000],
    "safety_identifier": [3],
    "prompt_cache_key": [3],
    "prompt_cache_retention": ["1h"],
    "service_tier": ["cheap"],
    "top_k": [-2],
    "min_p": [1.5],
    "presence_penalty": [3],
    "frequency_penalty": [-3],
    "repetition_penalty": [0],
    "seed": [2**63],
    "stop": [[""], 3],
    "stop_token_ids": [[-1]],
    "include_stop_str_in_output": [1],
    "ignore_eos": [1],
    "min_tokens": [-1],
    "skip_special_tokens": [1],
    "spaces_between_special_tokens": [1],
    "bad_words": [[""]],
    "allowed_token_ids": [[]],
    "logit_bias": [{"x": 1}],
    "structured_outputs": [{}, {"json": {}, "regex": "a"}, {"json": 3}, {"choice": []}],
    "thinking_token_budget": [-2],
    "chat_template_kwargs": [3, {"messages": []}],
    "priority": [2**63, 5],
    "cache_salt": ["", "x" * 1025],
}  # fmt: skip


def test_tables_are_complete() -> None:
    """No field without a bad value."""
    assert BAD.keys() == set(ResponseRequest.__struct_fields__)


@pytest.mark.parametrize("name", sorted(PARAMS))
def test_sampling(talker: Talker, name: str) -> None:
    """The engine gets the value."""
    value, theirs, expected = PARAMS[name]
    talker.ask(**{name: value})
    assert getattr(talker.request.params, theirs) == expected


@pytest.mark.parametrize("name", sorted(ECHOED))
def test_echo(talker: Talker, name: str) -> None:
    """The object says what was asked."""
    assert talker.ask(**{name: ECHOED[name]})[name] == ECHOED[name]


@pytest.mark.parametrize(("name", "at"), [(name, at) for name, values in BAD.items() for at in range(len(values))])
def test_bad_values(talker: Talker, name: str, at: int) -> None:
    """400 with the field's name."""
    error = talker.refusal(**{name: BAD[name][at]})
    assert error["param"] is not None and error["param"].startswith(name), error
    assert name in error["message"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_refused(talker: Talker, name: str) -> None:
    """Fields of what is not offered are refused by name; null asks for nothing."""
    assert talker.refusal(**{name: {"id": "x"}})["param"] == name
    assert talker.ask(**{name: None})["status"] == "completed"


@pytest.mark.parametrize("name", sorted(SKIPPED))
def test_skipped(talker: Talker, name: str) -> None:
    """Fields that cannot change the answer are skipped, and the answer says so."""
    assert any(name in notice for notice in talker.ask(**{name: {}})["notices"])


def test_shapes(talker: Talker) -> None:
    """The object has exactly the published fields."""
    answer = talker.ask()
    record = msgspec.convert(answer, ResponseObject)
    assert msgspec.to_builtins(record) == answer and "notices" not in answer


def test_reasoning_effort(talker: Talker) -> None:
    """The effort opens or closes the thought in the template, and is echoed; summaries are noticed."""
    talker.ask(reasoning={"effort": "none"})
    assert talker.prompt.endswith("<think>\n\n</think>\n\n")
    answer = talker.ask("Hm.\n</think>\n\nHi", reasoning={"effort": "high", "summary": "auto"})
    assert talker.prompt.endswith("<think>\n") and answer["reasoning"] == {"effort": "high", "summary": None}
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
    assert "summary" in answer["notices"][0]
    assert "notices" not in talker.ask(reasoning={"effort": "low", "context": "auto"}, text={"verbosity": "medium"})
    assert len(talker.ask(reasoning={"mode": "pro"}, text={"verbosity": "low"})["notices"]) == 2


def test_text_formats(talker: Talker) -> None:
    """B139: formats are enforced by a grammar that begins where the reasoning ends; two of them are one too many."""
    for form in ({"type": "json_object"}, {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": False}):
        answer = talker.ask('{"a": 1}', text={"format": form}, reasoning={"effort": "none"})
        assert talker.request.constraint is not None and talker.request.constraint.grammar
        assert answer["text"]["format"] == form
    talker.ask(text={"format": {"type": "text"}})
    assert talker.request.constraint is None
    talker.ask("b", structured_outputs={"choice": ["a", "b"]}, reasoning={"effort": "none"})
    assert talker.request.constraint is not None and talker.request.constraint.grammar
    both = talker.refusal(structured_outputs={"regex": "a"}, text={"format": {"type": "json_object"}})
    assert both["param"] == "structured_outputs"
    broken = talker.refusal(text={"format": {"type": "json_schema", "name": "a", "schema": {"type": "banana"}}})
    assert broken["param"].startswith("text.format")


def test_tool_choices(talker: Talker) -> None:
    """Which tools the template sees, and when a grammar is there."""
    talker.ask(tools=FUNCTIONS)
    assert "get_weather" in talker.prompt and "get_time" in talker.prompt and talker.request.constraint is None
    talker.ask(tools=FUNCTIONS, tool_choice="none")
    assert "get_weather" not in talker.prompt
    call = '<tool_call>\n{"name": "get_time", "arguments": {"zone": 1}}\n</tool_call>'
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "get_time"}]}
    for choice in ("required", {"type": "function", "name": "get_time"}, allowed):
        answer = talker.ask(call, tools=FUNCTIONS, tool_choice=choice)
        assert talker.request.constraint is not None and talker.request.constraint.grammar
        assert answer["output"][-1]["name"] == "get_time" and answer["tool_choice"] == choice
    assert "get_weather" not in talker.prompt
    talker.ask("x", tools=[{**FUNCTIONS[0], "strict": True}])
    assert talker.request.constraint is not None
    error = talker.refusal(tools=[{"type": "web_search"}], tool_choice="required")
    assert error["param"] == "tool_choice"
    skipped = talker.ask("x", tools=[{"type": "web_search"}, *FUNCTIONS], tool_choice="auto")
    assert "web_search" in skipped["notices"][0] and len(skipped["tools"]) == 3


def test_parallel_tool_calls(talker: Talker) -> None:
    """Off: one call, whatever the model does."""
    calls = "\n".join(
        f'<tool_call>\n{{"name": "get_time", "arguments": {{"zone": {z}}}}}\n</tool_call>' for z in (1, 2)
    )
    assert len(talker.ask(calls, tools=FUNCTIONS)["output"]) == 2
    assert len(talker.ask(calls, tools=FUNCTIONS, parallel_tool_calls=False)["output"]) == 1


def test_namespaces(talker: Talker) -> None:
    """Tools of a namespace are called under their own name, and their namespace is told; history comes back the same."""
    tools = [
        {
            "type": "namespace",
            "name": "mcp__files",
            "description": "Files.",
            "tools": [{**FUNCTIONS[0], "name": "read"}],
        }
    ]
    says = '<tool_call>\n{"name": "mcp__files__read", "arguments": {"city": "x"}}\n</tool_call>'
    answer = talker.ask(says, tools=tools)
    call = answer["output"][-1]
    assert (call["name"], call["namespace"]) == ("read", "mcp__files") and "mcp__files__read" in talker.prompt
    output = {"type": "function_call_output", "call_id": call["call_id"], "output": "text"}
    talker.ask("ok", tools=tools, input=[{"role": "user", "content": "q"}, call, output])
    assert '{"name": "mcp__files__read", "arguments": {"city": "x"}}' in talker.prompt
    choice = {"type": "function", "name": "read", "namespace": "mcp__files"}
    assert talker.ask(says, tools=tools, tool_choice=choice)["output"][-1]["name"] == "read"


def test_custom_formats(talker: Talker) -> None:
    """A regex is enforced; a Lark grammar is shown to the model, and the answer says that it is no more than that."""
    regex = {"type": "grammar", "syntax": "regex", "definition": "[a-c]+"}
    says = '<tool_call>\n{"name": "t", "arguments": {"input": "abc"}}\n</tool_call>'
    answer = talker.ask(says, tools=[{"type": "custom", "name": "t", "format": regex}])
    assert talker.request.constraint is not None and "notices" not in answer
    assert answer["output"][-1]["input"] == "abc"
    lark = {"type": "grammar", "syntax": "lark", "definition": 'start: "a"+'}
    answer = talker.ask(says, tools=[{"type": "custom", "name": "t", "description": "T.", "format": lark}])
    assert "not enforced" in answer["notices"][0] and 'start: \\"a\\"+' in talker.prompt


def test_template_variables_and_routing(talker: Talker) -> None:
    """chat_template_kwargs, cache_salt; a prompt_cache_key splits no cache."""
    talker.ask(chat_template_kwargs={"enable_thinking": True})
    assert talker.prompt.endswith("<think>\n")
    talker.ask(cache_salt="s")
    assert talker.request.cache_salt == "s"
    talker.ask(prompt_cache_key="k", user="u")
    assert talker.request.cache_salt is None


def test_truncation(talker: Talker) -> None:
    """Too long is 400 by default. "auto" leaves out the oldest turns, never the instructions, and says how many."""
    turns = [
        {"role": role, "content": f"{role} {n} " + "x" * 900} for n in range(10) for role in ("user", "assistant")
    ] + [{"role": "user", "content": "the end"}]  # fmt: skip
    body: dict[str, Any] = {"input": turns, "instructions": "Never forget."}
    for truncation in ({}, {"truncation": "disabled"}):
        assert talker.refusal(**body, **truncation)["param"] == "input"
    answer = talker.ask(**body, truncation="auto")
    prompt = talker.prompt
    assert "Never forget." in prompt and "the end" in prompt and "user 0 " not in prompt and "user 9 " in prompt
    first = prompt.index("<|im_start|>", 5)
    assert prompt[first:].startswith("<|im_start|>user\nuser")
    left_out = 20 - prompt.count("x" * 900)
    assert any(f"first {left_out} messages" in notice for notice in answer["notices"])
    assert len(talker.request.prompt_token_ids) < MAX_LEN
    assert len(talker.request.prompt_token_ids) + 2 * 900 > MAX_LEN - 200, "more was left out than needed"
    many = [{"role": "user", "content": "m"}] * (2 * MAX_LEN)
    answer = talker.ask(input=many, instructions="Never forget.", truncation="auto")
    assert "Never forget." in talker.prompt and len(talker.request.prompt_token_ids) > MAX_LEN - 200
    assert talker.refusal(input=many)["param"] == "input"
    assert "notices" not in talker.ask(truncation="auto")
    assert talker.refusal(input="x" * MAX_LEN, truncation="auto")["param"] == "input"


def test_store_false(talker: Talker) -> None:
    """Not stored is not found, by id or by item."""
    answer = talker.ask(store=False)
    assert answer["store"] is False
    assert talker.http.get(f"{PATH}/{answer['id']}").status_code == 404
    reference = talker.refusal(input=[{"type": "item_reference", "id": answer["output"][0]["id"]}])
    assert "item_reference" in reference["message"] and reference["param"] == "input[0].id"


def test_hostile_bodies(talker: Talker) -> None:
    """Deep nesting, wrong JSON and surrogates are 400, never 500."""
    deep = b'{"input": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    nested: Any = "x"
    for _ in range(200):
        nested = [nested]
    item = {"type": "mcp_call", "id": "i", "name": "n", "arguments": "{}", "server_label": "s", "error": nested}
    headers = {"content-type": "application/json"}
    for body in (
        deep,
        b"{",
        b"[]",
        b'{"input": "\\ud800"}',
        b'{"input": "\xff"}',
        msgspec.json.encode({"input": [item]}),
    ):
        answer = talker.http.post(PATH, content=body, headers=headers)
        assert answer.status_code == 400, (body[:50], answer.text)


def test_keep_alive(thinker: Preparer) -> None:
    """While nothing is said, comments are; an error is then a failed event."""
    for talker in talking(thinker, ServerConfig(port=0, sse_keep_alive_interval=0.05), delay=0.3):
        raw = talker.http.post(PATH, json={"input": "hi", "stream": True}).content
        assert raw.startswith(b": keep-alive\n\n") and b"response.completed" in raw
        talker.live.engine.script = lambda request, index: [-1]
        raw = talker.http.post(PATH, json={"input": "hi", "stream": True}).content
        assert b"event: response.created" in raw and b"event: response.failed" in raw


def test_keys_are_apart(thinker: Preparer) -> None:
    """One key cannot fetch, continue, cancel or delete what another one stored."""
    for talker in talking(thinker, ServerConfig(port=0, api_key=["alice", "bob"])):
        alice, bob = ({"authorization": f"Bearer {name}"} for name in ("alice", "bob"))
        answer = talker.http.post(PATH, json={"input": "hi"}, headers=alice).json()
        url = f"{PATH}/{answer['id']}"
        assert talker.http.get(url, headers=alice).status_code == 200
        for method, path in (("GET", url), ("DELETE", url), ("POST", url + "/cancel"), ("GET", url + "/input_items")):
            assert talker.http.request(method, path, headers=bob).status_code == 404
        chained = talker.http.post(PATH, json={"input": "x", "previous_response_id": answer["id"]}, headers=bob)
        assert chained.status_code == 404
