"""Chat messages as templates expect them: plain data, no nulls, content in the one form the template reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import jinja2
import jinja2.nodes

from samovar.errors import ValidationError

ContentFormat: TypeAlias = Literal["auto", "string", "openai"]
"""How a template takes message content: as one string, as a list of parts, or as its source shows."""

TEXT_PARTS = ("text", "input_text", "output_text", "refusal", "thinking")
PART_SEPARATOR = "\n"
"""Between the text parts of one message, when the template wants a string."""

_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def normalize(messages: Sequence[Mapping[str, Any]], wants: Literal["string", "openai"]) -> list[dict[str, Any]]:
    """Copies of the messages, ready for a template.

    Content that is null or absent becomes "". Text parts are joined by a line end for a template that `wants` strings
    and stay parts otherwise. Other null fields are dropped. Arguments of tool calls that are JSON objects in a string
    become objects, absent ones empty objects. Reasoning is given under every name that templates read. Raises
    `ValidationError` for a message that is not an object with a role, and for parts that are not text.
    """
    if isinstance(messages, (str, bytes)) or not isinstance(messages, Sequence) or not messages:
        raise ValidationError("messages must be a non-empty list", parameter="messages", value=messages)
    return [_message(message, f"messages[{i}]", wants) for i, message in enumerate(messages)]


def last_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """Text of the last message, as `echo` returns it."""
    return _joined(messages[-1].get("content"), f"messages[{len(messages) - 1}]")


def _message(message: Mapping[str, Any], where: str, wants: str) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or not message["role"]:
        raise ValidationError(f"{where} must be an object with a role", parameter="messages", value=message)
    out = {key: plain(value, where) for key, value in message.items() if value is not None and key != "content"}
    content = message.get("content")
    keeps_parts = wants == "openai" and not isinstance(content, (str, type(None)))
    out["content"] = _parts(content, where) if keeps_parts else _joined(content, where)
    reasoning = next((out[name] for name in _REASONING_FIELDS if name in out), None)
    if reasoning is not None:
        out = {"thinking": reasoning, **out, "reasoning_content": reasoning}
    if isinstance(calls := out.get("tool_calls"), list):
        out["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return out


def _joined(content: Any, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return PART_SEPARATOR.join(part["text"] for part in _parts(content, where))


def _parts(content: Any, where: str) -> list[dict[str, Any]]:
    """Content parts, each `{"type": "text", "text": ...}`."""
    if not isinstance(content, (list, tuple)):
        message = f"{where}.content must be a string or a list of parts, got {content!r}"
        raise ValidationError(message, parameter="messages", value=content)
    return [_part(part, f"{where}.content[{i}]") for i, part in enumerate(content)]


def _part(part: Any, where: str) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind not in TEXT_PARTS:
        what = f"a part of type {kind!r}" if isinstance(part, Mapping) else f"{part!r}"
        raise ValidationError(f"{where}: this model takes text only, got {what}", parameter="messages", value=kind)
    text = part.get("text", part.get(kind))
    if text is not None and not isinstance(text, str):
        raise ValidationError(f"{where}.text must be a string, got {text!r}", parameter="messages", value=text)
    return {"type": "text", "text": text or ""}


def _call(call: Any, where: str) -> dict[str, Any]:
    if not isinstance(call, dict):
        raise ValidationError(f"{where} must be an object", parameter="messages", value=call)
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str | None):
        return call
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except (ValueError, RecursionError):
        return call
    if arguments is None:
        arguments = {}
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def with_object_arguments(chat: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The messages with arguments that are no object (a model's broken JSON) put into one; None if there are none.

    For templates that walk through arguments.
    """
    found = False
    turns = []
    for turn in chat:
        calls = turn.get("tool_calls")
        if isinstance(calls, list):
            wrapped = [_wrapped(call) for call in calls]
            found = found or any(new is not old for new, old in zip(wrapped, calls, strict=True))
            turn = {**turn, "tool_calls": wrapped}
        turns.append(turn)
    return turns if found else None


def _wrapped(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or isinstance(function.get("arguments"), dict):
        return call
    return {**call, "function": {**function, "arguments": {"arguments": function.get("arguments")}}}


def plain(value: Any, where: str) -> Any:
    """A copy made of JSON types only: templates never see objects with methods of their own."""
    try:
        return _plain(value, where)
    except RecursionError:
        message = f"{where}: contains itself, or is nested too deeply"
        raise ValidationError(message, parameter="messages") from None


def _plain(value: Any, where: str) -> Any:
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        return {_plain(key, where): _plain(item, where) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, where) for item in value]
    if callable(dump := getattr(value, "model_dump", None)):
        return _plain(dump(exclude_none=True), where)
    raise ValidationError(f"{where}: {type(value).__name__} is not JSON data", parameter="messages", value=value)


def detect_content_format(tree: jinja2.nodes.Template) -> Literal["string", "openai"]:
    """Which form of content a template reads: "openai" if it loops over a message's content, else "string"."""
    holders = {"content"}
    for assign in tree.find_all(jinja2.nodes.Assign):
        if isinstance(assign.target, jinja2.nodes.Name) and _reads_content(assign.node, frozenset()):
            holders.add(assign.target.name)
    for macro in tree.find_all(jinja2.nodes.Macro):
        holders.update(arg.name for arg in macro.args if "content" in arg.name)
    found = any(_reads_content(loop.iter, frozenset(holders)) for loop in tree.find_all(jinja2.nodes.For))
    return "openai" if found else "string"


def tests_for_string(tree: jinja2.nodes.Template) -> bool:
    """Whether the template asks what type something is, so that plain strings are fine in an "openai" template."""
    names = {"string", "iterable", "sequence", "mapping"}
    return any(test.name in names for test in tree.find_all(jinja2.nodes.Test))


def _reads_content(node: jinja2.nodes.Node, names: frozenset[str]) -> bool:
    """Whether an expression is a message's content, possibly sliced or filtered."""
    if isinstance(node, jinja2.nodes.Name):
        return node.name in names
    if isinstance(node, jinja2.nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, jinja2.nodes.Getitem):
        if isinstance(node.arg, jinja2.nodes.Const) and node.arg.value == "content":
            return True
        return isinstance(node.arg, jinja2.nodes.Slice) and _reads_content(node.node, names)
    if isinstance(node, jinja2.nodes.Call) and isinstance(node.node, jinja2.nodes.Getattr) and node.args:
        return node.node.attr == "get" and getattr(node.args[0], "value", None) == "content"
    if isinstance(node, jinja2.nodes.Filter) and node.node is not None:
        return node.name in ("list", "reverse", "selectattr", "rejectattr") and _reads_content(node.node, names)
    return False
