"""Tool fields of chat completions -> what a `Dialogue` takes; the names of 2023 (functions) as well."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from samovar.core.tools import ToolChoice, ToolDefinition
from samovar.errors import ValidationError
from samovar.server.openai.schema import ChatTool, FunctionTool, ToolFields
from samovar.text.tool_schema import choice_from_openai, tool_definition


@dataclass(frozen=True, slots=True, kw_only=True)
class AskedTools:
    """The tools of a call. `is_legacy`: asked for as functions, so the answer has a function_call."""

    tools: Sequence[ToolDefinition] = ()
    choice: ToolChoice = "none"
    parallel: bool = True
    is_legacy: bool = False


def read_tools(asked: ToolFields, *, may_choose: bool = True) -> AskedTools:
    """Tools and choice of a chat call. `may_choose` false: "auto" counts as "none". Raises `ValidationError`."""
    if asked.functions is not None and asked.tools:
        raise ValidationError("functions is the old name of tools; send one of them", parameter="functions")
    is_legacy = bool(asked.functions) or (asked.function_call is not None and not asked.tools)
    if is_legacy:
        tools = [_definition(tool, f"functions[{at}]") for at, tool in enumerate(asked.functions or ())]
        choice, tools_left = choice_from_openai(_legacy_choice(asked.function_call), tools, parameter="function_call")
    else:
        tools = definitions(asked.tools or ())
        choice, tools_left = choice_from_openai(asked.tool_choice, tools)
    if choice == "auto" and not (tools_left and may_choose):
        choice = "none"
    parallel = asked.parallel_tool_calls is not False and not is_legacy
    return AskedTools(tools=tools_left, choice=choice, parallel=parallel, is_legacy=is_legacy)


def definitions(tools: Sequence[ChatTool]) -> list[ToolDefinition]:
    """Tools of a body -> definitions. Raises `ValidationError`."""
    return [_definition(tool.function, f"tools[{at}].function") for at, tool in enumerate(tools)]


def _definition(tool: FunctionTool, where: str) -> ToolDefinition:
    return tool_definition(tool.name, tool.description, tool.parameters, tool.strict, parameter=where)


def _legacy_choice(choice: str | dict[str, Any] | None) -> Any:
    """`function_call` -> the same as tool_choice."""
    if isinstance(choice, dict):
        return {"type": "function", "function": choice}
    return choice


def modern_history(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages in which a function_call is a tool call, and the role function is tool."""
    return [_modern(message) for message in messages]


def _modern(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    call = message.get("function_call")
    if call is None or message.get("tool_calls"):
        return message
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return {**rest, "tool_calls": [{"type": "function", "function": call}]}
