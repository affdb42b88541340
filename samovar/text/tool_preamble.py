"""Tools for chat templates that know none: definitions and instructions go into the system message, and calls and
results of the history into the text, all in the hermes format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Content: TypeAlias = str | list[dict[str, Any]]

FORMAT = "hermes"
"""The format these words teach."""

_BEFORE = """\
You may call functions to help with what the user asks. Each line between <tools> and </tools> describes one function, \
its parameters as a JSON Schema:
<tools>
"""
_AFTER = """
</tools>

To call a function, answer with a JSON object that holds its name and its arguments, between <tool_call> and </tool_call>:
<tool_call>
{"name": "the function's name", "arguments": {"a parameter": "its value"}}
</tool_call>
Several calls are several such blocks. The results come back between <tool_response> and </tool_response>."""


def preamble(tools: Sequence[Mapping[str, Any]]) -> str:
    """Definitions (in the form templates read) and how to call them."""
    lines = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return _BEFORE + lines + _AFTER


def with_preamble(
    chat: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]], *, in_system: bool = True
) -> list[dict[str, Any]]:
    """Normalized messages with the preamble at the end of the first system message.

    Without a system message a new one is made, or (`in_system` false) the first user message begins with it.
    """
    text, turns = preamble(tools), list(chat)
    for at, turn in enumerate(turns):
        if turn["role"] in ("system", "developer"):
            turns[at] = {**turn, "content": _joined(turn["content"], text)}
            return turns
    first_user = next((at for at, turn in enumerate(turns) if turn["role"] == "user"), None)
    if in_system or first_user is None:
        return [{"role": "system", "content": text}, *turns]
    turn = turns[first_user]
    turns[first_user] = {**turn, "content": _joined(text, turn["content"])}
    return turns


def history_as_text(chat: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Normalized messages with calls as text of the assistant and results as text of the user.

    Neighbouring results, and what the user says after them, become one message: many templates want turns to alternate.
    """
    turns: list[dict[str, Any]] = []
    joins = False
    for turn in chat:
        role, calls = turn["role"], turn.get("tool_calls")
        if role in ("tool", "function"):
            result = _joined(_joined("<tool_response>", turn["content"], "\n"), "</tool_response>", "\n")
            if joins:
                turns[-1] = {**turns[-1], "content": _joined(turns[-1]["content"], result, "\n")}
            else:
                turns.append({"role": "user", "content": result})
        elif role == "user" and joins:
            turns[-1] = {**turns[-1], "content": _joined(turns[-1]["content"], turn["content"])}
        elif isinstance(calls, list) and calls:
            rest = {key: value for key, value in turn.items() if key != "tool_calls"}
            turns.append({**rest, "content": _joined(turn["content"], "\n".join(map(_call, calls)), "\n")})
        else:
            turns.append(turn)
        joins = role in ("tool", "function")
    return turns


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function")
    if not isinstance(function, Mapping):
        function = call
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    written = f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": {arguments.strip() or "{}"}}}'
    return f"<tool_call>\n{written}\n</tool_call>"


def _joined(first: Content, second: Content, between: str = "\n\n") -> Content:
    """Two contents as one: a text if both are, else parts."""
    if isinstance(first, str) and isinstance(second, str):
        return between.join(text for text in (first, second) if text)
    if isinstance(first, str):
        first = [{"type": "text", "text": first + between}]
    if isinstance(second, str):
        second = [{"type": "text", "text": between + second}]
    return [*first, *second]
