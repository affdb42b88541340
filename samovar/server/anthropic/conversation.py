"""Messages of Anthropic's form -> messages of the chat form that templates read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from samovar.errors import ValidationError
from samovar.server.anthropic.schema import ContentBlock, Message
from samovar.server.anthropic.tool_ids import own_id
from samovar.server.anthropic.unions import (
    REFUSED_BLOCKS,
    REFUSED_IN_RESULT,
    REFUSED_SOURCES,
    SKIPPED_BLOCKS,
    USED_BLOCKS,
    USED_IN_RESULT,
    USED_SOURCES,
    note_inside,
    note_skipped,
    refuse,
)

T = TypeVar("T")

BETWEEN_TURNS = "\n\n"
TEXT_ONLY = frozenset({"text"})
_BY_ASSISTANT = frozenset({"thinking", "redacted_thinking", "tool_use", "compaction", "fallback"})
_BY_USER = frozenset({"tool_result", "document", "search_result"})

Chat = list[dict[str, Any]]


class ChatWriter:
    """Collects turns. Neighbours of one role become one turn, and results come right after the calls they answer."""

    def __init__(self) -> None:
        self.chat: Chat = []
        self._names: dict[str, str] = {}
        """Id of each tool call so far -> the tool."""
        self._notes: list[str] = []
        """Words of the operator that wait for the next user turn."""

    def add(self, message: Message, where: str, *, is_last: bool) -> None:
        """One message. Raises `ValidationError` naming what is not supported, or not in its place."""
        content = message.content
        for name in ("clear_at", "output_config"):
            if getattr(message, name) is not None:
                note_inside(f"messages.{name}")
        if content is None and message.role != "system":
            raise ValidationError(f"{where}.content is required", parameter=f"{where}.content")
        blocks = [ContentBlock(type="text", text=content)] if isinstance(content, str) else content or []
        if message.role == "system":
            self._notes += [_note(text_of_system(blocks, f"{where}.content"))] if blocks else []
            return
        if not blocks and not (is_last and message.role == "assistant"):
            raise ValidationError(f"{where}.content must not be empty", parameter=f"{where}.content")
        for at, block in enumerate(blocks):
            check_block(block, message.role, f"{where}.content[{at}]")
        if message.role == "user":
            self._user(blocks, where)
        else:
            self._assistant(blocks, where)

    def close(self) -> None:
        """After the last message: what still waits becomes a user turn."""
        if self._notes:
            self._say("user", [])

    def _user(self, blocks: Sequence[ContentBlock], where: str) -> None:
        texts = []
        for at, block in enumerate(blocks):
            place = f"{where}.content[{at}]"
            if block.type == "tool_result":
                self._result(block, place)
            elif block.type not in SKIPPED_BLOCKS:
                texts.append(text_of_block(block, place))
        if texts:
            self._say("user", texts)

    def _result(self, block: ContentBlock, where: str) -> None:
        public = needed(block.tool_use_id, where, "tool_use_id")
        name = self._names.get(public)
        if name is None:
            message = f"{where}.tool_use_id: no tool_use block before it has the id {public[:128]!r}"
            raise ValidationError(message, parameter=f"{where}.tool_use_id", value=public)
        text = text_of_result(block, where)
        if block.is_error and not text.lstrip().lower().startswith(("error", "<tool_use_error")):
            text = f"Error: {text}" if text else "Error"
        self.chat.append({"role": "tool", "tool_call_id": own_id(public), "name": name, "content": text})

    def _assistant(self, blocks: Sequence[ContentBlock], where: str) -> None:
        self.close()
        texts, thoughts, calls = [], [], []
        for at, block in enumerate(blocks):
            place = f"{where}.content[{at}]"
            if block.type == "tool_use":
                calls.append(self._call(block, place))
            elif block.type == "thinking":
                thoughts.append(needed(block.thinking, place, "thinking"))
            elif block.type not in SKIPPED_BLOCKS:
                texts.append(text_of_block(block, place))
        turn = self._turn("assistant")
        turn["content"] += "".join(texts)
        if thought := "\n".join(filter(None, [turn.get("reasoning"), *thoughts])):
            turn["reasoning"] = thought
        if calls:
            turn.setdefault("tool_calls", []).extend(calls)

    def _call(self, block: ContentBlock, where: str) -> dict[str, Any]:
        public, name = needed(block.id, where, "id"), needed(block.name, where, "name")
        if block.input is None:
            raise ValidationError(f"{where}.input is required", parameter=f"{where}.input")
        self._names[public] = name
        arguments = msgspec.json.encode(block.input).decode()
        return {"id": own_id(public), "type": "function", "function": {"name": name, "arguments": arguments}}

    def _say(self, role: str, texts: list[str]) -> None:
        texts, self._notes = [*self._notes, *texts], []
        turn = self._turn(role)
        turn["content"] = BETWEEN_TURNS.join(filter(None, [turn["content"], "\n".join(texts)]))

    def _turn(self, role: str) -> dict[str, Any]:
        if not self.chat or self.chat[-1]["role"] != role:
            self.chat.append({"role": role, "content": ""})
        return self.chat[-1]


def _note(text: str) -> str:
    """A word of the operator in the middle of a conversation: many templates take a system message only at its start."""
    return f"<system>\n{text}\n</system>"


def needed(value: T | None, where: str, name: str) -> T:
    """A field that a block or tool of its type must have."""
    if value is None:
        raise ValidationError(f"{where}.{name} is required", parameter=f"{where}.{name}")
    return value


def check_block(block: ContentBlock, role: str, where: str) -> None:
    """Refuse blocks by name: unknown ones, unsupported ones, and those of the other role; note those that are skipped."""
    kind = block.type
    if kind in REFUSED_BLOCKS:
        raise refuse(f"{where}.type", kind, REFUSED_BLOCKS[kind])
    if kind in (_BY_USER if role == "assistant" else _BY_ASSISTANT):
        message = f"{where}.type: {kind!r} does not belong into a message of role {role!r}"
        raise ValidationError(message, parameter=f"{where}.type", value=kind)
    if isinstance(block.citations, dict) and block.citations.get("enabled"):
        note_inside("content.citations")
    if kind in SKIPPED_BLOCKS:
        note_skipped("block", kind, SKIPPED_BLOCKS[kind])
    elif kind not in USED_BLOCKS:
        raise refuse(f"{where}.type", kind, "no such block is known")


def text_of_system(blocks: Sequence[ContentBlock], where: str) -> str:
    """The text of a system prompt: text blocks only."""
    for at, block in enumerate(blocks):
        if block.type != "text":
            raise refuse(f"{where}[{at}].type", block.type, "a system prompt holds text blocks only")
    texts = [needed(block.text, f"{where}[{at}]", "text") for at, block in enumerate(blocks)]
    return "\n".join(filter(None, texts))


def text_of_block(block: ContentBlock, where: str) -> str:
    """What a model reads of a text, document, search_result or compaction block."""
    if block.type == "text":
        return needed(block.text, where, "text")
    if block.type == "document":
        return _titled(block, _document(block, where))
    if block.type == "search_result":
        if not isinstance(block.source, str):
            raise ValidationError(f"{where}.source must be a string", parameter=f"{where}.source")
        return _titled(block, f"{block.source}\n{_joined(block.content, f'{where}.content', TEXT_ONLY)}")
    if not isinstance(block.content, str | None):
        raise ValidationError(f"{where}.content must be a string", parameter=f"{where}.content")
    return block.content or ""


def text_of_result(block: ContentBlock, where: str) -> str:
    """What a model reads of a tool's result."""
    return _joined(block.content, f"{where}.content", USED_IN_RESULT)


def _titled(block: ContentBlock, text: str) -> str:
    return "\n".join(filter(None, [block.title, block.context, text]))


def _document(block: ContentBlock, where: str) -> str:
    source = block.source
    kind = source.get("type") if isinstance(source, dict) else None
    if kind in REFUSED_SOURCES:
        raise refuse(f"{where}.source.type", str(kind), REFUSED_SOURCES[str(kind)])
    if kind not in USED_SOURCES or not isinstance(source, dict):
        known = ", ".join(sorted(USED_SOURCES))
        raise ValidationError(
            f"{where}.source.type must be one of {known}", parameter=f"{where}.source.type", value=kind
        )
    if kind == "content":
        return _joined(source.get("content"), f"{where}.source.content", TEXT_ONLY)
    if not isinstance(source.get("data"), str):
        raise ValidationError(f"{where}.source.data must be a string", parameter=f"{where}.source.data")
    return str(source["data"])


def _joined(content: Any, where: str, used: frozenset[str]) -> str:
    """The text of content that is absent, a string, or a list of blocks."""
    if content is None or isinstance(content, str):
        return content or ""
    try:
        blocks = msgspec.convert(content, type=list[ContentBlock])
    except msgspec.ValidationError as error:
        rule, _, path = str(error).partition(" - at `$")
        place = where + path.rstrip("`")
        if rule.startswith("Object missing required field"):
            place, rule = f"{place}.{rule.split('`')[1]}", "is required"
        raise ValidationError(f"{place}: {rule}", parameter=place) from None
    texts = []
    for at, block in enumerate(blocks):
        place = f"{where}[{at}]"
        if block.type in REFUSED_IN_RESULT:
            raise refuse(f"{place}.type", block.type, REFUSED_IN_RESULT[block.type])
        if block.type not in used:
            raise refuse(f"{place}.type", block.type, "it does not belong here")
        texts.append(
            needed(block.tool_name, place, "tool_name")
            if block.type == "tool_reference"
            else text_of_block(block, place)
        )
    return "\n".join(texts)
