"""Input items -> chat messages. Every type of the published schema has a row in `ITEMS`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from samovar.errors import ValidationError
from samovar.server.responses.kinds import Refused, Skipped, Treatment, Used, read, type_of
from samovar.server.responses.notices import Notices

SEPARATOR = "\n"
"""Between the text parts of what must be one text."""

TEXT_PARTS = ("input_text", "output_text", "text", "refusal", "summary_text", "reasoning_text")
"""Types of parts that hold text."""

Content = str | list[dict[str, Any]]


class Message(msgspec.Struct, kw_only=True):
    """Something that was said, in its short form (content is a string) or its long one."""

    role: Literal["user", "system", "developer", "assistant"]
    content: Content | None


class ReasoningInput(msgspec.Struct, kw_only=True):
    """Earlier reasoning. `content` is shown to the template; what is encrypted was not encrypted by this server."""

    content: list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """An earlier call of a function."""

    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class CallOutput(msgspec.Struct, kw_only=True):
    """What an earlier call of a function or a custom tool came to."""

    output: Content
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None


class CustomCall(msgspec.Struct, kw_only=True):
    """An earlier call of a custom tool."""

    call_id: str
    name: str
    input: str
    namespace: str | None = None


class LocalShellCall(msgspec.Struct, kw_only=True):
    """An earlier call of OpenAI's local shell tool."""

    call_id: str
    action: dict[str, Any]


class LocalShellOutput(msgspec.Struct, kw_only=True):
    """What it came to. The schema names the call by `id`."""

    output: str
    id: str | None = None
    call_id: str | None = None


class ShellCall(msgspec.Struct, kw_only=True):
    """An earlier call of OpenAI's shell tool."""

    call_id: str
    action: dict[str, Any]


class ShellOutput(msgspec.Struct, kw_only=True):
    """What its commands printed."""

    call_id: str
    output: list[dict[str, Any]]


class PatchCall(msgspec.Struct, kw_only=True):
    """An earlier call of OpenAI's patch tool."""

    call_id: str
    operation: dict[str, Any]


class PatchOutput(msgspec.Struct, kw_only=True):
    """What it came to."""

    call_id: str
    status: str
    output: str | None = None


class McpCall(msgspec.Struct, kw_only=True):
    """An earlier call that another server made of a remote tool, and its result."""

    id: str
    name: str
    arguments: str
    server_label: str
    output: str | None = None
    error: Any = None


class CodeCall(msgspec.Struct, kw_only=True):
    """Code that another server ran, and what it printed."""

    id: str
    code: str | None = None
    outputs: list[dict[str, Any]] | None = None


class FileSearchCall(msgspec.Struct, kw_only=True):
    """A search that another server made, with what it found, if that was asked for."""

    id: str
    queries: list[str]
    results: list[dict[str, Any]] | None = None


class MoreTools(msgspec.Struct, kw_only=True):
    """Tools that joined in the middle of a conversation."""

    tools: list[dict[str, Any]]


class Reference(msgspec.Struct, kw_only=True):
    """Stands for an item of a stored response."""

    id: str


_HOSTED = "it tells of a tool that this server does not run, and holds no result that the model could read"
_SEALED = "it can only be read by the server that wrote it; send the items themselves"
_COMPUTER = "it needs a model that sees screenshots; leave such items out"

ITEMS: dict[str, Treatment] = {
    "message": Used(Message),
    "reasoning": Used(ReasoningInput),
    "function_call": Used(FunctionCall),
    "function_call_output": Used(CallOutput),
    "custom_tool_call": Used(CustomCall),
    "custom_tool_call_output": Used(CallOutput),
    "local_shell_call": Used(LocalShellCall),
    "local_shell_call_output": Used(LocalShellOutput),
    "shell_call": Used(ShellCall),
    "shell_call_output": Used(ShellOutput),
    "apply_patch_call": Used(PatchCall),
    "apply_patch_call_output": Used(PatchOutput),
    "mcp_call": Used(McpCall),
    "code_interpreter_call": Used(CodeCall),
    "file_search_call": Used(FileSearchCall),
    "additional_tools": Used(MoreTools),
    "tool_search_output": Used(MoreTools),
    "item_reference": Used(Reference),
    "web_search_call": Skipped(_HOSTED),
    "tool_search_call": Skipped("all tools are shown to the model at once; there is nothing to search"),
    "mcp_list_tools": Skipped("tools of remote servers are not called from here"),
    "mcp_approval_request": Skipped("tools of remote servers are not called from here"),
    "mcp_approval_response": Skipped("tools of remote servers are not called from here"),
    "computer_call": Refused(_COMPUTER),
    "computer_call_output": Refused(_COMPUTER),
    "image_generation_call": Refused("the model takes text only; describe the picture in a message instead"),
    "compaction": Refused(_SEALED),
    "compaction_trigger": Refused("the server does not shorten conversations; send a shorter one"),
    "configuration_update": Refused("set reasoning.effort and text in the request itself"),
    "program": Refused("programs are not run here; send the calls and their outputs"),
    "program_output": Refused("programs are not run here; send the calls and their outputs"),
}
"""Type of an item -> what becomes of it."""


def chat_name(name: str, namespace: str | None) -> str:
    """What the model calls a tool: tools of a namespace carry its name in front."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"


class Conversation:
    """Reads items one after the other. `messages` are in chat form; `tools` came with the items.

    What the assistant thought, said and called, one after the other, is one message, as chat templates have it.
    `find` gives stored items by their id.
    """

    def __init__(self, notices: Notices, find: Callable[[str], dict[str, Any] | None]) -> None:
        self.messages: list[dict[str, Any]] = []
        self.tools: list[dict[str, Any]] = []
        self._notices = notices
        self._find = find
        self._names: dict[str, str] = {}
        self._turn: dict[str, Any] | None = None

    def instruct(self, text: str) -> None:
        """The request's own instructions, before everything else."""
        self.messages.append({"role": "system", "content": text})

    def add(self, raw: Any, where: str) -> None:
        """Take one item. Raises `ValidationError` naming it."""
        kind = item_type(raw, where)
        treatment = ITEMS.get(kind)
        if treatment is None:
            known = ", ".join(ITEMS)
            message = f"{where}: items of type {kind[:100]!r} are not known here; known are {known}"
            raise ValidationError(message, parameter=f"{where}.type", value=kind)
        if isinstance(treatment, Skipped):
            treatment.note(f"an item of type {kind}", self._notices)
        elif isinstance(treatment, Refused):
            treatment.refuse(f"an item of type {kind!r}", where)
        else:
            self._take(kind, read(raw, treatment.shape, where), where)

    def _take(self, kind: str, item: Any, where: str) -> None:
        match item:
            case Message():
                self._say(item, where)
            case ReasoningInput():
                self._think(item, where)
            case FunctionCall():
                self._call(item.call_id, chat_name(item.name, item.namespace), item.arguments)
            case CustomCall():
                arguments = json.dumps({"input": item.input}, ensure_ascii=False)
                self._call(item.call_id, chat_name(item.name, item.namespace), arguments)
            case CallOutput():
                name = chat_name(item.name, item.namespace) if item.name else None
                self._answer(item.call_id or "", text_of(item.output, f"{where}.output"), name)
            case MoreTools():
                self.tools += item.tools
            case Reference():
                self._refer(item.id, where)
            case _:
                self._take_foreign(kind, item)

    def _take_foreign(self, kind: str, item: Any) -> None:
        """Calls of tools that have types of their own: to the model they are functions like all others."""
        match item:
            case LocalShellCall():
                self._call(item.call_id, "local_shell", _dumped(item.action))
            case LocalShellOutput():
                self._answer(item.call_id or item.id or "", item.output)
            case ShellCall():
                self._call(item.call_id, "shell", _dumped(item.action))
            case ShellOutput():
                self._answer(item.call_id, SEPARATOR.join(_dumped(part) for part in item.output))
            case PatchCall():
                self._call(item.call_id, "apply_patch", _dumped(item.operation))
            case PatchOutput():
                self._answer(item.call_id, f"{item.status}{SEPARATOR}{item.output}" if item.output else item.status)
            case McpCall():
                result = item.output if item.error is None else _dumped({"error": item.error})
                self._ran(item.id, chat_name(item.name, item.server_label), item.arguments, result)
            case CodeCall():
                printed = [str(part["logs"]) for part in item.outputs or () if "logs" in part]
                self._ran(item.id, "code_interpreter", _dumped({"code": item.code or ""}), SEPARATOR.join(printed))
            case FileSearchCall(results=None):
                Skipped(_HOSTED).note(f"an item of type {kind}", self._notices)
            case FileSearchCall():
                found = SEPARATOR.join(_dumped(result) for result in item.results or ())
                self._ran(item.id, "file_search", _dumped({"queries": item.queries}), found)

    def _ran(self, call_id: str, name: str, arguments: str, result: str | None) -> None:
        self._call(call_id, name, arguments)
        self._answer(call_id, result or "")

    def _refer(self, item_id: str, where: str) -> None:
        item = self._find(item_id)
        if item is None or item_type(item, where) == "item_reference":
            message = (
                f"{where}: item_reference: no stored item has the id {item_id[:100]!r} (responses with store: false are "
                "not stored, and old ones are dropped); send the item itself"
            )
            raise ValidationError(message, parameter=f"{where}.id", value=item_id)
        self.add(item, where)

    # --- messages

    def _say(self, item: Message, where: str) -> None:
        content = parts_of(item.content, f"{where}.content")
        if item.role == "assistant":
            if self._turn is None or "content" in self._turn or "tool_calls" in self._turn:
                self._begin()
            assert self._turn is not None
            self._turn["content"] = content
            return
        self._turn = None
        if item.role != "user" and all(message["role"] == "system" for message in self.messages):
            # Instructions at the beginning are one message: many templates take one system message, and only there.
            self.messages = [{"role": "system", "content": _merged([*self.messages, {"content": content}])}]
            return
        self.messages.append({"role": item.role, "content": content})

    def _think(self, item: ReasoningInput, where: str) -> None:
        if not item.content:
            if item.encrypted_content:
                self._notices.add("encrypted reasoning was skipped: it was not encrypted by this server")
            return
        text = text_of(item.content, f"{where}.content")
        if self._turn is None or "content" in self._turn or "tool_calls" in self._turn:
            self._begin()
        assert self._turn is not None
        before = self._turn.get("reasoning")
        self._turn["reasoning"] = text if before is None else f"{before}{SEPARATOR}{text}"

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        if self._turn is None:
            self._begin()
        assert self._turn is not None
        self._names[call_id] = name
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._turn.setdefault("tool_calls", []).append(call)

    def _answer(self, call_id: str, text: str, name: str | None = None) -> None:
        self._turn = None
        message = {"role": "tool", "tool_call_id": call_id, "content": text}
        name = self._names.get(call_id, name)
        if name is not None:
            message["name"] = name
        self.messages.append(message)

    def _begin(self) -> None:
        self._turn = {"role": "assistant"}
        self.messages.append(self._turn)


def item_type(raw: Any, where: str) -> str:
    """The type of an item; those of messages and references may be left out."""
    kind = type_of(raw, where)
    if kind:
        return kind
    if "role" in raw:
        return "message"
    if raw.keys() == {"id"}:
        return "item_reference"
    raise ValidationError(f"{where}.type is required", parameter=f"{where}.type")


def parts_of(content: Content | None, where: str) -> Content:
    """Content for a chat message: a string stays one, parts become text parts. Raises `ValidationError` for others."""
    if content is None or isinstance(content, str):
        return content or ""
    return [{"type": "text", "text": _part_text(part, f"{where}[{at}]")} for at, part in enumerate(content)]


def text_of(content: Content | Sequence[dict[str, Any]] | None, where: str) -> str:
    """Content as one text."""
    if content is None or isinstance(content, str):
        return content or ""
    return SEPARATOR.join(_part_text(part, f"{where}[{at}]") for at, part in enumerate(content))


def _part_text(part: Any, where: str) -> str:
    kind = type_of(part, where)
    if kind not in TEXT_PARTS:
        message = f"{where}: a part of type {kind[:100]!r} is not supported here: the model takes text only"
        raise ValidationError(message, parameter=f"{where}.type", value=kind)
    field = "refusal" if kind == "refusal" else "text"
    text = part.get(field)
    if not isinstance(text, str):
        raise ValidationError(f"{where}.{field} must be a string", parameter=f"{where}.{field}", value=text)
    return text


def _merged(messages: Sequence[dict[str, Any]]) -> str:
    texts = [text_of(message["content"], "input") for message in messages]
    return "\n\n".join(text for text in texts if text)


def _dumped(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
