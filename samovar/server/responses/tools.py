"""Tools and tool_choice of a request -> `ToolDefinition`s, and back: which kind of item a call of the model becomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from samovar.core.tools import NamedTool, ToolChoice, ToolDefinition
from samovar.errors import ValidationError
from samovar.server.responses.items import chat_name
from samovar.server.responses.kinds import Refused, Skipped, Treatment, Used, read, type_of
from samovar.server.responses.notices import Notices
from samovar.text.tool_schema import tool_definition

INPUT = "input"
"""The one parameter of a custom tool."""


class FunctionTool(msgspec.Struct, kw_only=True):
    """A function that the client runs. `strict` must be given to be enforced where the model is free not to call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    allowed_callers: list[str] | None = None


class InputFormat(msgspec.Struct, kw_only=True):
    """What the input of a custom tool must look like."""

    type: str
    syntax: str | None = None
    definition: str | None = None


class CustomTool(msgspec.Struct, kw_only=True):
    """A tool that takes free text: to the model, a function with one string."""

    name: str
    description: str | None = None
    format: InputFormat | None = None
    allowed_callers: list[str] | None = None


class NamespaceTool(msgspec.Struct, kw_only=True):
    """Tools that belong together."""

    name: str
    tools: list[dict[str, Any]]
    description: str | None = None


_NOT_RUN = "this server runs no tools of its own"
_OWN_FORM = "offer it as a function or custom tool and it is called"

TOOLS: dict[str, Treatment] = {
    "function": Used(FunctionTool),
    "custom": Used(CustomTool),
    "namespace": Used(NamespaceTool),
    "file_search": Skipped(_NOT_RUN),
    "web_search": Skipped(_NOT_RUN),
    "web_search_2025_08_26": Skipped(_NOT_RUN),
    "web_search_preview": Skipped(_NOT_RUN),
    "web_search_preview_2025_03_11": Skipped(_NOT_RUN),
    "mcp": Skipped(_NOT_RUN),
    "code_interpreter": Skipped(_NOT_RUN),
    "image_generation": Skipped(_NOT_RUN),
    "computer": Skipped("it needs a model that sees screenshots"),
    "computer_use_preview": Skipped("it needs a model that sees screenshots"),
    "programmatic_tool_calling": Skipped(_NOT_RUN),
    "tool_search": Skipped("all tools are shown to the model at once"),
    "local_shell": Skipped(_OWN_FORM),
    "shell": Skipped(_OWN_FORM),
    "apply_patch": Skipped(_OWN_FORM),
}
"""Type of a tool -> what becomes of it. Types that are not here are skipped as well: agents send new ones at any time."""
_UNKNOWN = Skipped("the type is not known here")


@dataclass(frozen=True, slots=True)
class Target:
    """What a call by the model is a call of."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


@dataclass(slots=True)
class ToolSet:
    """The tools of a request that a model can call, by the names it knows them under."""

    definitions: list[ToolDefinition] = field(default_factory=list)
    targets: dict[str, Target] = field(default_factory=dict)

    def target(self, name: str) -> Target:
        """What `name` calls; a name that is no tool's is a function's."""
        return self.targets.get(name) or Target(name)


def read_tools(raw: Iterable[Any], notices: Notices, where: str = "tools") -> ToolSet:
    """Read the tools of a request. Raises `ValidationError` naming the one that is wrong."""
    found = ToolSet()
    for at, tool in enumerate(raw):
        _read_tool(tool, f"{where}[{at}]", None, found, notices)
    return found


def _read_tool(raw: Any, where: str, namespace: str | None, found: ToolSet, notices: Notices) -> None:
    kind = type_of(raw, where)
    if not kind:
        raise ValidationError(f"{where}.type is required", parameter=f"{where}.type")
    treatment = TOOLS.get(kind, _UNKNOWN)
    if isinstance(treatment, Skipped):
        treatment.note(f"a tool of type {kind[:100]}", notices)
        return
    if isinstance(treatment, Refused):
        treatment.refuse(f"a tool of type {kind!r}", where)
        return
    tool = read(raw, treatment.shape, where)
    if isinstance(tool, NamespaceTool):
        if namespace is not None:
            raise ValidationError(f"{where}: a namespace cannot stand in another", parameter=where)
        for at, inner in enumerate(tool.tools):
            _read_tool(inner, f"{where}.tools[{at}]", tool.name, found, notices)
        return
    assert isinstance(tool, (FunctionTool, CustomTool))
    if tool.allowed_callers and "direct" not in tool.allowed_callers:
        notices.add(f"the tool {tool.name[:128]} was skipped: only programs may call it, and none run here")
        return
    name = chat_name(tool.name, namespace)
    if isinstance(tool, FunctionTool):
        definition = tool_definition(name, tool.description, tool.parameters, tool.strict, parameter=where)
    else:
        definition = _custom_definition(name, tool, where, notices)
    found.definitions.append(definition)
    found.targets[name] = Target(tool.name, namespace, isinstance(tool, CustomTool))


def _custom_definition(name: str, tool: CustomTool, where: str, notices: Notices) -> ToolDefinition:
    """A function with one string. A regex is enforced; a grammar is shown to the model, in the description."""
    description, schema = tool.description or "", {"type": "string"}
    wanted = tool.format
    if wanted is not None and wanted.type == "grammar":
        if wanted.syntax not in ("lark", "regex") or not wanted.definition:
            message = f"{where}.format needs a syntax (lark or regex) and a definition"
            raise ValidationError(message, parameter=f"{where}.format")
        if wanted.syntax == "regex":
            schema["pattern"] = f"^(?:{wanted.definition})$"
        else:
            notices.add(f"the grammar of the custom tool {tool.name[:128]} is shown to the model, but not enforced")
        described = f"The {INPUT} must match this {wanted.syntax} definition:\n{wanted.definition}"
        description = f"{description}\n\n{described}" if description else described
    elif wanted is not None and wanted.type != "text":
        message = f"{where}.format.type must be text or grammar, got {wanted.type[:100]!r}"
        raise ValidationError(message, parameter=f"{where}.format.type")
    parameters = {"type": "object", "properties": {INPUT: schema}, "required": [INPUT], "additionalProperties": False}
    return tool_definition(name, description, parameters, "pattern" in schema, parameter=where)


def read_choice(raw: Any, tools: ToolSet) -> tuple[ToolChoice, list[ToolDefinition]]:
    """tool_choice -> the choice, and the tools it leaves. Raises `ValidationError`.

    A choice that needs a tool which was skipped is refused: it could not be honoured.
    """
    everything = tools.definitions
    if raw is None:
        return ("auto" if everything else "none"), everything
    if raw in ("none", "auto", "required"):
        if raw == "required" and not everything:
            message = 'tool_choice: "required" needs a tool that this server can offer to the model, and none was sent'
            raise ValidationError(message, parameter="tool_choice", value=raw)
        return raw, everything
    if not isinstance(raw, Mapping):
        message = f'tool_choice must be "none", "auto", "required" or an object, got {str(raw)[:100]!r}'
        raise ValidationError(message, parameter="tool_choice", value=raw)
    if raw.get("type") == "allowed_tools":
        return _allowed(raw, tools)
    return NamedTool(_named(raw, tools, "tool_choice")), everything


def _allowed(raw: Mapping[str, Any], tools: ToolSet) -> tuple[ToolChoice, list[ToolDefinition]]:
    """A choice among some of the tools; the others are not shown to the model."""
    mode, listed = raw.get("mode", "auto"), raw.get("tools")
    if mode not in ("auto", "required"):
        message = f'tool_choice.mode must be "auto" or "required", got {str(mode)[:100]!r}'
        raise ValidationError(message, parameter="tool_choice.mode", value=mode)
    if not isinstance(listed, Sequence) or isinstance(listed, str) or not listed:
        raise ValidationError("tool_choice.tools must be a list of tools", parameter="tool_choice.tools", value=listed)
    names = set()
    for at, entry in enumerate(listed):
        where = f"tool_choice.tools[{at}]"
        if type_of(entry, where) in ("function", "custom"):
            names.add(_named(entry, tools, where))
    kept = [tool for tool in tools.definitions if tool.name in names]
    if mode == "required" and not kept:
        message = "tool_choice.tools names no tool that this server can offer to the model"
        raise ValidationError(message, parameter="tool_choice.tools")
    return (mode if kept else "none"), kept


def _named(raw: Mapping[str, Any], tools: ToolSet, where: str) -> str:
    """The model's name of the tool that a choice names."""
    kind, name = raw.get("type"), raw.get("name")
    if kind not in ("function", "custom"):
        message = f"{where}: tools of type {str(kind)[:100]!r} cannot be chosen: {_NOT_RUN}"
        raise ValidationError(message, parameter=where, value=kind)
    if not isinstance(name, str):
        raise ValidationError(f"{where}.name is required", parameter=f"{where}.name", value=name)
    namespace = raw.get("namespace")
    for known, target in tools.targets.items():
        is_meant = known == name or (target.name == name and namespace in (None, target.namespace))
        if is_meant and target.is_custom == (kind == "custom"):
            return known
    listed = ", ".join(tools.targets)[:500] or "none"
    message = f"{where}: there is no {kind} tool {name[:128]!r} among the tools that can be called ({listed})"
    raise ValidationError(message, parameter=where, value=name)
