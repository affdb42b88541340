"""Items -> messages: what belongs together is one message, and nothing is lost on the way."""

from __future__ import annotations

from typing import Any

import pytest

from samovar.errors import ValidationError
from samovar.server.responses.items import Conversation
from samovar.server.responses.notices import MAX_NOTICES, Notices


def _messages(*items: Any, stored: dict[str, Any] | None = None, instructions: str = "") -> list[dict[str, Any]]:
    conversation = Conversation(Notices(), (stored or {}).get)
    if instructions:
        conversation.instruct(instructions)
    for at, item in enumerate(items):
        conversation.add(item, f"input[{at}]")
    return conversation.messages


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _thought(text: str) -> dict[str, Any]:
    return {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": text}],
        "encrypted_content": None,
    }


def _call(call_id: str, name: str = "f") -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": name, "arguments": '{"a": 1}', "status": "completed"}


def _output(call_id: str, output: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def test_one_turn_is_one_message() -> None:
    """Reasoning, text and parallel calls of a turn are one assistant message; outputs know their tool's name."""
    said = {"type": "message", "role": "assistant", "id": "m", "status": "completed",
            "content": [{"type": "output_text", "text": "hm", "annotations": []}]}  # fmt: skip
    messages = _messages(
        _user("q"), _thought("t"), said, _call("1"), _call("2", "g"), _output("2", "B"), _output("1", "A")
    )
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "tool"]
    turn = messages[1]
    assert (turn["reasoning"], turn["content"]) == ("t", [{"type": "text", "text": "hm"}])
    assert [c["id"] for c in turn["tool_calls"]] == ["1", "2"]
    assert [(m["tool_call_id"], m["name"], m["content"]) for m in messages[2:]] == [("2", "g", "B"), ("1", "f", "A")]


def test_turns_stay_apart() -> None:
    """Reasoning after a call, or text after text, begins a new message."""
    messages = _messages(_thought("a"), _call("1"), _thought("b"), _call("2"))
    assert [m["reasoning"] for m in messages] == ["a", "b"]
    assert len(_messages(*[{"role": "assistant", "content": text} for text in "ab"])) == 2


def test_leading_instructions_are_one_message() -> None:
    """Many templates take one system message, at the beginning; later ones stay where they are."""
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "b"}]}
    messages = _messages(developer, {"role": "system", "content": "c"}, _user("q"), developer, instructions="a")
    assert [(m["role"], m["content"]) for m in messages[:1]] == [("system", "a\n\nb\n\nc")]
    assert [m["role"] for m in messages] == ["system", "user", "developer"]


@pytest.mark.parametrize(
    ("output", "text"),
    [
        ("x", "x"),
        ([{"type": "output_text", "text": "x"}], "x"),
        ([{"type": "input_text", "text": "x"}, {"type": "text", "text": "y"}], "x\ny"),
        ([], ""),
    ],
)
@pytest.mark.parametrize("kind", ["function_call_output", "custom_tool_call_output"])
def test_outputs(kind: str, output: Any, text: str) -> None:
    """B184: outputs are strings, lists of parts of any text type, or empty lists."""
    assert _messages({"type": kind, "call_id": "c", "output": output})[0]["content"] == text


def test_images_are_refused_by_name() -> None:
    """B184: an image in an output, or in a message, is refused with its place and its type."""
    image = {"type": "input_image", "image_url": "data:,"}
    for item in (_output("c", [image]), {"role": "user", "content": [{"type": "input_text", "text": "t"}, image]}):
        with pytest.raises(ValidationError, match="input_image") as caught:
            _messages(item)
        assert caught.value.parameter in ("input[0].output[0].type", "input[0].content[1].type")


def test_reasoning_forms() -> None:
    """B185: reasoning without summary or content is accepted; encrypted reasoning is skipped with a notice."""
    for item in (
        {"type": "reasoning"},
        {"type": "reasoning", "summary": []},
        {"type": "reasoning", "id": "rs_1", "content": None},
    ):
        assert _messages(item) == []
    notices = Notices()
    Conversation(notices, lambda _: None).add(
        {"type": "reasoning", "summary": [], "encrypted_content": "xx"}, "input[0]"
    )
    assert "encrypted" in notices.texts[0]


def test_references() -> None:
    """B185: a reference is the stored item; one to nothing, or to another reference, is refused with its name."""
    stored = {
        "m1": {"type": "message", "role": "user", "content": "q"},
        "loop": {"type": "item_reference", "id": "loop"},
    }
    for form in ({"type": "item_reference", "id": "m1"}, {"id": "m1"}):
        assert _messages(form, stored=stored) == [{"role": "user", "content": "q"}]
    for wrong in ("x", "loop"):
        with pytest.raises(ValidationError, match="item_reference") as caught:
            _messages({"type": "item_reference", "id": wrong}, stored=stored)
        assert caught.value.parameter == "input[0].id"


def test_foreign_calls_are_functions() -> None:
    """Shell and patch calls of other servers, namespaced calls, and results that came with a call."""
    messages = _messages(
        {
            "type": "local_shell_call",
            "id": "l",
            "call_id": "1",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"]},
        },
        {"type": "local_shell_call_output", "id": "1", "output": "a.txt"},
        {
            "type": "apply_patch_call",
            "call_id": "2",
            "status": "completed",
            "operation": {"type": "delete_file", "path": "a"},
        },
        {"type": "apply_patch_call_output", "call_id": "2", "status": "failed", "output": "no"},
        {"type": "custom_tool_call", "call_id": "3", "name": "p", "input": "x", "namespace": "mcp__s"},
        {"type": "mcp_call", "id": "4", "server_label": "s", "name": "n", "arguments": "{}", "output": "r"},
    )
    calls = [call["function"] for m in messages for call in m.get("tool_calls", [])]
    assert [call["name"] for call in calls] == ["local_shell", "apply_patch", "mcp__s__p", "s__n"]
    assert calls[2]["arguments"] == '{"input": "x"}'
    assert [m["content"] for m in messages if m["role"] == "tool"] == ["a.txt", "failed\nno", "r"]


@pytest.mark.parametrize(
    "item",
    [
        3,
        None,
        [],
        {},
        {"type": 3},
        {"type": "hologram"},
        {"id": "x", "text": "y"},
        {"type": "message", "role": "robot", "content": ""},
    ],
)
def test_nonsense(item: Any) -> None:
    """What is no item is refused with its place."""
    with pytest.raises(ValidationError) as caught:
        _messages(item)
    assert str(caught.value.parameter).startswith("input[0]")


def test_notices_are_bounded() -> None:
    """However many items are skipped, the answer stays small, and says each thing once."""
    notices = Notices()
    for at in range(100):
        notices.add(f"{at} " * 1000)
        notices.add("same")
    assert len(notices.texts) == MAX_NOTICES and notices.texts.count("same") == 1
    assert all(len(text) <= 300 for text in notices.texts)
