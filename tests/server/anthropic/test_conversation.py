"""Messages of Anthropic's form -> the chat form: roles, order, ids, and refusals that name the place."""

from __future__ import annotations

import logging
from typing import Any

import jsonschema
import msgspec
import pytest

from samovar.core.once import Once
from samovar.core.tools import NamedTool
from samovar.errors import ValidationError
from samovar.server.anthropic import unions
from samovar.server.anthropic.asking import NAMES, read_dialogue, read_values
from samovar.server.anthropic.schema import MessagesRequest
from samovar.server.dialogues import spelled

USE = {"type": "tool_use", "id": "toolu_abc", "name": "look", "input": {"at": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_abc", "content": "seen"}
LOOK = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "integer"}}},
}


def _asked(**fields: Any) -> MessagesRequest:
    return msgspec.convert(
        {"model": "m", "max_tokens": 4000, "messages": [{"role": "user", "content": "hi"}]} | fields, MessagesRequest
    )


def _chat(*messages: tuple[str, Any], **fields: Any) -> list[dict[str, Any]]:
    turns = [{"role": role, "content": content} for role, content in messages]
    return list(read_dialogue(_asked(messages=turns, **fields), None).messages)  # type: ignore[arg-type]


def test_tool_round_trip() -> None:
    """Thinking, text and calls of the model; results first, then what the user adds; ids as the engine made them."""
    thought = {"type": "thinking", "thinking": "hm", "signature": "any"}
    chat = _chat(
        (
            "user",
            [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}],
        ),
        ("assistant", [thought, {"type": "text", "text": "I look."}, USE]),
        ("user", [{"type": "text", "text": "and"}, RESULT]),
        system=[
            {"type": "text", "text": "one"},
            {"type": "text", "text": "two", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ],
    )
    call = {"id": "abc", "type": "function", "function": {"name": "look", "arguments": '{"at":1}'}}
    assert chat == [
        {"role": "system", "content": "one\ntwo"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "I look.", "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc", "name": "look", "content": "seen"},
        {"role": "user", "content": "and"},
    ]


def test_neighbours_become_one_turn() -> None:
    """Consecutive messages of one role, as the API has it."""
    chat = _chat(
        ("user", "a"),
        ("user", "b"),
        ("assistant", "c"),
        ("assistant", [{"type": "text", "text": "d"}, USE]),
        ("user", [RESULT]),
    )
    assert [turn["role"] for turn in chat] == ["user", "assistant", "tool"]
    assert (chat[0]["content"], chat[1]["content"]) == ("a\n\nb", "cd")


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({}, ""),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({"content": [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]}, "x\ny"),
        ({"content": "no such file", "is_error": True}, "Error: no such file"),
        ({"content": "Error: no", "is_error": True}, "Error: no"),
        ({"is_error": True}, "Error"),
        ({"content": [{"type": "tool_reference", "tool_name": "other"}]}, "other"),
        (
            {
                "content": [
                    {"type": "search_result", "source": "s", "title": "t", "content": [{"type": "text", "text": "x"}]}
                ]
            },
            "t\ns\nx",
        ),
    ],
)
def test_results(result: dict[str, Any], text: str) -> None:
    """Results are strings, lists of blocks, or nothing; errors say so."""
    turn = _chat(
        ("user", "a"), ("assistant", [USE]), ("user", [{"type": "tool_result", "tool_use_id": "toolu_abc"} | result])
    )[-1]
    assert turn == {"role": "tool", "tool_call_id": "abc", "name": "look", "content": text}


def test_documents() -> None:
    """Documents that are text are read."""
    plain = {
        "type": "document",
        "title": "T",
        "context": "C",
        "source": {"type": "text", "media_type": "text/plain", "data": "D"},
    }
    blocks = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "E"}]}}
    assert _chat(("user", [plain, blocks]))[0]["content"] == "T\nC\nD\nE"


def test_words_of_the_operator() -> None:
    """A system message between turns waits until the results are told; the first one is the system prompt."""
    chat = _chat(
        ("user", "a"), ("assistant", [USE]), ("system", "mind this"), ("user", [RESULT, {"type": "text", "text": "b"}])
    )
    assert [turn["role"] for turn in chat] == ["user", "assistant", "tool", "user"]
    assert chat[-1]["content"] == "<system>\nmind this\n</system>\nb"
    assert _chat(("system", "s"), ("user", "a"))[0] == {"role": "system", "content": "s"}
    assert _chat(("user", "a"), ("system", "s"))[-1]["content"] == "a\n\n<system>\ns\n</system>"


def test_prefill() -> None:
    """A last assistant message is continued; an empty one only says whose turn it is."""
    dialogue = read_dialogue(
        _asked(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "So"}]), None
    )
    assert dialogue.continue_final_message and not dialogue.add_generation_prompt
    dialogue = read_dialogue(
        _asked(messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": ""}]), None
    )
    assert dialogue.add_generation_prompt and len(dialogue.messages) == 1


def test_skipped_blocks() -> None:
    """What only Anthropic can read leaves no trace."""
    chat = _chat(
        ("user", "a"),
        ("assistant", [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "b"}]),
        ("user", "c"),
    )
    assert chat[1] == {"role": "assistant", "content": "b"}


def test_what_is_skipped_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for each name; nothing is left out in silence."""
    monkeypatch.setattr(unions, "_once", Once(logging.getLogger(unions.__name__)))
    document = {"type": "document", "citations": {"enabled": True}, "source": {"type": "text", "data": "D"}}
    turns = [
        {"role": "user", "content": [document]},
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
        {"role": "system", "clear_at": "never", "output_config": {"effort": "low"}},
        {"role": "user", "content": "go on"},
    ]
    asked = _asked(
        messages=turns,
        tools=[
            LOOK | {"defer_loading": True, "allowed_callers": ["code_execution_20260120"]},
            {"type": "computer_20251124"},
        ],
        thinking={"type": "adaptive", "block_binding": {"x": 1}},
        output_config={"task_budget": {"type": "tokens", "total": 9}},
        context_management={"edits": [{"type": "clear_thinking_20251015"}]},
    )
    for _ in range(2):
        read_dialogue(asked, None)
    for name in (*unions.SKIPPED_INSIDE, "redacted_thinking", "computer_20251124", "context_management"):
        assert caplog.text.count(repr(name)) == 1, name


def test_choices() -> None:
    """auto, any, tool, none; one call only; strict tools; examples reach the model."""
    tools = [LOOK, {**LOOK, "name": "strict", "strict": True, "type": "custom", "input_examples": [{"at": 3}]}]
    for choice, expected in (
        (None, "auto"), ({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none"),
        ({"type": "tool", "name": "look"}, NamedTool("look")),
    ):  # fmt: skip
        dialogue = read_dialogue(_asked(tools=tools, tool_choice=choice), None)
        assert dialogue.tool_choice == expected and dialogue.parallel_tool_calls
    assert [tool.strict for tool in dialogue.tools] == [False, True]
    assert dialogue.tools[1].description == 'Looks.\nExample input: {"at":3}'
    one = read_dialogue(_asked(tools=tools, tool_choice={"type": "auto", "disable_parallel_tool_use": True}), None)
    assert not one.parallel_tool_calls


def test_server_tools_are_skipped_unless_named() -> None:
    """The model is not told of them; a choice that names one is refused."""
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}
    assert [tool.name for tool in read_dialogue(_asked(tools=[search, LOOK]), None).tools] == ["look"]
    with pytest.raises(ValidationError, match="web_search"):
        read_dialogue(_asked(tools=[search, LOOK], tool_choice={"type": "tool", "name": "web_search"}), None)
    with pytest.raises(ValidationError, match="at least one tool"):
        read_dialogue(_asked(tools=[search], tool_choice={"type": "any"}), None)


def test_tools_of_the_client_have_interfaces() -> None:
    """bash, text editor and memory are only named in a request; the model hears what they take."""
    kinds = {
        "bash_20250124": "bash",
        "text_editor_20250728": "str_replace_based_edit_tool",
        "memory_20250818": "memory",
    }
    tools = read_dialogue(_asked(tools=[{"type": kind, "name": name} for kind, name in kinds.items()]), None).tools
    assert [tool.name for tool in tools] == list(kinds.values())
    for tool in tools:
        jsonschema.Draft202012Validator.check_schema(tool.parameters)
        jsonschema.validate(
            {"command": "view", "path": "/memories"} if tool.name != "bash" else {"command": "ls"}, tool.parameters
        )
        assert tool.description
    old, new = (
        read_dialogue(_asked(tools=[{"type": f"text_editor_{date}", "name": "edit"}]), None).tools[0].parameters
        for date in ("20250124", "20250728")
    )
    assert ("undo_edit" in old["properties"]["command"]["enum"]) and "undo_edit" not in new["properties"]["command"][
        "enum"
    ]


@pytest.mark.parametrize(
    ("fields", "effort", "budget"),
    [
        ({}, "none", None),
        ({"thinking": {"type": "disabled"}}, "none", None),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "high", 2000),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}, "low", None),
        ({"thinking": {"type": "between_tools"}}, "high", None),
    ],
)
def test_thinking(fields: dict[str, Any], effort: str, budget: int | None) -> None:
    """D9: thinking is off unless asked for; its budget becomes the house's own."""
    asked = _asked(**fields)
    assert read_dialogue(asked, None).reasoning_effort == effort
    assert read_values(asked, "")["thinking_token_budget"] == budget


def test_budget_below_max_tokens() -> None:
    """As the API has it, and as its beta lifts it."""
    asked = _asked(max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 2000})
    with pytest.raises(ValidationError, match="below max_tokens"):
        read_values(asked, "")
    assert read_values(asked, "x,interleaved-thinking-2025-05-14")["thinking_token_budget"] == 2000


def test_values() -> None:
    """Sampling fields under the house's names."""
    values = read_values(_asked(temperature=0.5, top_p=0.9, top_k=3, stop_sequences=["x"]), "")
    assert (values["temperature"], values["top_p"], values["top_k"], values["stop"], values["max_tokens"]) == (
        0.5,
        0.9,
        3,
        ["x"],
        4000,
    )


def test_structured_output() -> None:
    """Both spellings of one field."""
    form = {"type": "json_schema", "schema": {"type": "object"}}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        structured = read_dialogue(_asked(**fields), None).structured
        assert structured is not None and structured.json == {"type": "object"}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y"}}
SEARCH = {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}}
PDF = {"type": "document", "source": {"type": "base64", "data": "JVBERi0="}}
FORM = {"type": "json_schema", "schema": {}}


def _user(*blocks: Any) -> dict[str, Any]:
    return {"messages": [("user", list(blocks))]}


def _assistant(*blocks: Any) -> dict[str, Any]:
    return {"messages": [("user", "a"), ("assistant", list(blocks))]}


def _result(content: Any) -> dict[str, Any]:
    return {"messages": [("user", "a"), ("assistant", [USE]), ("user", [RESULT | {"content": content}])]}


BAD: list[tuple[str, dict[str, Any]]] = [
    ("messages[0].content[0].type", _user(IMAGE)),
    ("messages[0].content[0].type", _user({"type": "nonsense"})),
    ("messages[0].content[0].type", _user(USE)),
    ("messages[0].content[0].text", _user({"type": "text"})),
    ("messages[0].content", _user()),
    ("messages[0].content", {"messages": [("user", None)]}),
    ("messages[0].content[0].tool_use_id", _user(RESULT)),
    ("messages[0].content[0].source.type", _user(PDF)),
    ("messages[0].content[0].source.data", _user({"type": "document", "source": {"type": "text"}})),
    ("messages[1].content[0].type", _assistant(RESULT)),
    ("messages[1].content[0].type", _assistant(SEARCH)),
    ("messages[1].content[0].input", _assistant({"type": "tool_use", "id": "x", "name": "y"})),
    ("messages", _assistant(USE)),
    ("messages[2].content[0].content[0].type", _result([IMAGE])),
    ("messages[2].content[0].content[0].type", _result([{"no": "type"}])),
    ("messages[2].content[0].content", _result(5)),
    ("system[1].type", {"system": [{"type": "text", "text": "x"}, {"type": "image"}]}),
    ("tools[0].input_schema", {"tools": [{"name": "x"}]}),
    ("tools[0].name", {"tools": [{"input_schema": {}}]}),
    ("tools[0].type", {"tools": [{"type": "magic_20990101", "name": "x"}]}),
    ("tools[0].input_schema.type", {"tools": [{"name": "x", "input_schema": {"type": "string"}}]}),
    ("tools", {"tools": [LOOK, LOOK]}),
    ("tool_choice.name", {"tools": [LOOK], "tool_choice": {"type": "tool", "name": "other"}}),
    ("tool_choice.name", {"tools": [LOOK], "tool_choice": {"type": "tool"}}),
    ("tool_choice", {"tool_choice": {"type": "any"}}),
    ("container", {"container": "c"}),
    ("mcp_servers", {"mcp_servers": [{"type": "url", "url": "http://x", "name": "x"}]}),
    ("thread", {"thread": {"id": "x"}}),
    ("thinking.budget_tokens", {"thinking": {"type": "enabled"}}),
    ("output_format", {"output_format": FORM, "output_config": {"format": FORM}}),
]


@pytest.mark.parametrize(("place", "fields"), BAD)
def test_refusals_name_the_place(place: str, fields: dict[str, Any]) -> None:
    """B188: what is not supported is refused by name, and what is wrong with its place."""
    if "messages" in fields:
        turns = [{"role": role, "content": content} for role, content in fields["messages"]]
        fields = fields | {"messages": turns}
    asked = _asked(**fields)
    with pytest.raises(ValidationError) as caught:
        read_dialogue(asked, None)
        read_values(asked, "")
    assert caught.value.parameter == place
    assert place in str(caught.value)


def test_our_names_become_theirs() -> None:
    """Refusals further down speak of our fields; the caller hears of his."""

    def work() -> None:
        raise ValidationError("stop: at most 16 stop strings, got 17", parameter="stop")

    with pytest.raises(ValidationError, match=r"^stop_sequences: at most 16") as caught:
        spelled(work, NAMES)
    assert caught.value.parameter == "stop_sequences"
