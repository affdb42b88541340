"""Tools of a request: what clients send -> `ToolDefinition`s, checked; and back to the form that templates read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from samovar.core.tools import NamedTool, ToolChoice, ToolDefinition
from samovar.core.validation import RequestLimits
from samovar.errors import ValidationError
from samovar.text.nesting import check_depth

NAME_PATTERN = r"^[a-zA-Z0-9_.-]{1,128}$"
_name = re.compile(NAME_PATTERN)
_ANY_OBJECT = {"type": "object", "properties": {}}
"""What templates get for a tool without parameters: many look for `properties`."""


def _refuse(message: str, parameter: str, value: Any) -> None:
    raise ValidationError(f"{parameter}: {message}", parameter=parameter, value=value)


def tool_definition(
    name: Any, description: Any, parameters: Any, strict: Any = None, *, parameter: str = "tools"
) -> ToolDefinition:
    """One tool, its types checked; None stands for what was not given. Raises `ValidationError`."""
    if not isinstance(name, str) or _name.match(name) is None:
        _refuse(f"a tool's name must match {NAME_PATTERN}, got {name!r}"[:300], parameter, name)
    if not isinstance(description, str | None):
        _refuse(f"the description of {name} must be a string", parameter, description)
    if not isinstance(parameters, Mapping | None):
        _refuse(f"the parameters of {name} must be a JSON Schema object", parameter, parameters)
    if parameters and parameters.get("type", "object") != "object":
        kind = parameters["type"]
        _refuse(f"the parameters of {name} must have type object, got {kind!r}"[:300], parameter, kind)
    if not isinstance(strict, bool | None):
        _refuse(f"strict of {name} must be true or false", parameter, strict)
    return ToolDefinition(
        name=name, description=description or "", parameters=dict(parameters or {}), strict=bool(strict)
    )


def from_openai(raw: Sequence[Any], *, parameter: str = "tools") -> list[ToolDefinition]:
    """Tools as chat completions take them: `{"type": "function", "function": {...}}`. Raises `ValidationError`."""
    tools = []
    for at, tool in enumerate(raw):
        where = f"{parameter}[{at}]"
        if not isinstance(tool, Mapping):
            _refuse("must be an object", where, tool)
        kind = tool.get("type", "function")
        if kind != "function":
            _refuse(f"tools of type {kind!r} are not available here; only functions are"[:300], where, kind)
        function = tool.get("function")
        if not isinstance(function, Mapping):
            _refuse("needs a function object", where, function)
        strict = function.get("strict", tool.get("strict"))
        tools.append(
            tool_definition(
                function.get("name"), function.get("description"), function.get("parameters"), strict, parameter=where
            )
        )
    return tools


def choice_from_openai(
    raw: Any, tools: Sequence[ToolDefinition], *, parameter: str = "tool_choice"
) -> tuple[ToolChoice, Sequence[ToolDefinition]]:
    """tool_choice as chat completions take it -> the choice, and the tools it leaves. None means auto, or none without
    tools. Raises `ValidationError`."""
    if raw is None:
        return ("auto" if tools else "none"), tools
    if raw in ("none", "auto", "required"):
        return raw, tools
    if isinstance(raw, Mapping):
        function = raw.get("function", raw)
        if raw.get("type") == "function" and isinstance(function, Mapping) and isinstance(function.get("name"), str):
            return NamedTool(function["name"]), tools
        if raw.get("type") == "allowed_tools":
            return _allowed(raw.get("allowed_tools", raw), tools, parameter)
    shape = '"none", "auto", "required", or {"type": "function", "function": {"name": ...}}'
    raise ValidationError(f"{parameter} must be {shape}, got {str(raw)[:200]}", parameter=parameter, value=raw)


def _allowed(raw: Any, tools: Sequence[ToolDefinition], parameter: str) -> tuple[ToolChoice, Sequence[ToolDefinition]]:
    """`{"mode": "auto" or "required", "tools": [...]}`: a choice among some of the tools."""
    listed = raw.get("tools") if isinstance(raw, Mapping) else None
    mode = raw.get("mode", "auto") if isinstance(raw, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(listed, Sequence) or not listed:
        message = f"{parameter}: allowed_tools needs a mode (auto or required) and a list of tools"
        raise ValidationError(message, parameter=parameter, value=raw)
    names = set()
    for tool in listed:
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not any(name == known.name for known in tools):
            message = f"{parameter}: allowed_tools names {str(name)[:128]!r}, which is not among the tools"
            raise ValidationError(message, parameter=parameter, value=name)
        names.add(name)
    return mode, [tool for tool in tools if tool.name in names]


def check_tools(tools: Sequence[ToolDefinition], choice: ToolChoice, limits: RequestLimits) -> None:
    """What must hold of the tools of a request together, and of a choice among them. Raises `ValidationError`."""
    if len(tools) > limits.max_tools:
        _refuse(f"at most {limits.max_tools} tools per request (--max-tools), got {len(tools)}", "tools", len(tools))
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            _refuse(f"two tools are called {tool.name!r}; give each a name of its own", "tools", tool.name)
        seen.add(tool.name)
        if _name.match(tool.name) is None:
            _refuse(f"a tool's name must match {NAME_PATTERN}, got {tool.name!r}"[:300], "tools", tool.name)
        check_depth("tools", tool.parameters)
    if tools:
        size = len(msgspec.json.encode(tools))
        if size > limits.max_tools_bytes:
            _refuse(f"{size} bytes of definitions are over {limits.max_tools_bytes} (--max-tools-bytes)", "tools", size)
    if isinstance(choice, NamedTool) and choice.name not in seen:
        known = ", ".join(sorted(seen))[:500] or "none were sent"
        _refuse(f"there is no tool {choice.name[:128]!r} among the tools ({known})", "tool_choice", choice.name)
    if choice == "required" and not tools:
        _refuse('"required" needs tools', "tool_choice", choice)


def for_template(tools: Sequence[ToolDefinition]) -> list[dict[str, Any]] | None:
    """Tools in the form chat templates read; None without any, as templates expect."""
    return [{"type": "function", "function": _function(tool)} for tool in tools] or None


def _function(tool: ToolDefinition) -> dict[str, Any]:
    parameters = dict(tool.parameters) or _ANY_OBJECT
    return {"name": tool.name, "description": tool.description, "parameters": parameters}
