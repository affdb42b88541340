"""Every item type, tool type, event type and field of the published schema has a place here: a new one cannot be forgotten."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from openai.types.responses import (
    ResponseIncludable,
    ResponseInputItem,
    ResponseItem,
    ResponseOutputItem,
    ResponseStreamEvent,
    Tool,
)
from openai.types.responses.response_create_params import (
    ResponseCreateParamsNonStreaming,
    ResponseCreateParamsStreaming,
)

from samovar.errors import ValidationError
from samovar.server.responses import grammar
from samovar.server.responses.items import ITEMS, Conversation
from samovar.server.responses.kinds import Refused, Skipped, Used
from samovar.server.responses.notices import Notices
from samovar.server.responses.refusals import KNOWN
from samovar.server.responses.schema import Include, ResponseRequest
from samovar.server.responses.tools import TOOLS, read_tools


def types_in(union: Any) -> dict[str, type[Any]]:
    """The `type` values of a union's members -> the member."""
    if typing.get_origin(union) is typing.Annotated:
        return types_in(typing.get_args(union)[0])
    if typing.get_origin(union) is typing.Union:
        return {name: kind for member in typing.get_args(union) for name, kind in types_in(member).items()}
    annotation = union.model_fields["type"].annotation
    literals = [annotation, *typing.get_args(annotation)]
    found = [
        v for literal in literals if typing.get_origin(literal) is typing.Literal for v in typing.get_args(literal)
    ]
    assert found, union
    return dict.fromkeys(found, union)


INPUT = types_in(ResponseInputItem) | types_in(ResponseItem) | types_in(ResponseOutputItem)
TOOL_TYPES = types_in(Tool)


def sample(kind: Any, depth: int = 0) -> Any:
    """A value of an SDK type, required fields only."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return sample(args[0], depth)
    if origin is typing.Union:
        return sample(args[0], depth)
    if origin is typing.Literal:
        return args[0]
    if origin in (list, typing.List):  # noqa: UP006
        return [sample(args[0], depth + 1)] if depth < 4 else []
    if origin is dict:
        return {}
    if isinstance(kind, type) and hasattr(kind, "model_fields"):
        needed = {name: f for name, f in kind.model_fields.items() if f.is_required() or name == "type"}
        return {name: sample(f.annotation, depth + 1) for name, f in needed.items()}
    return {str: "x", int: 1, float: 1.0, bool: True}.get(kind, {})


def _read(item: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    notices = Notices()
    conversation = Conversation(notices, lambda item_id: None)
    conversation.add(item, "input[0]")
    return conversation.messages or [{}] if conversation.tools else conversation.messages, notices.texts


def test_tables_are_complete() -> None:
    """Each type of the SDK's unions has a row, and no row is invented."""
    assert INPUT.keys() == ITEMS.keys()
    assert TOOL_TYPES.keys() == TOOLS.keys()
    assert set(typing.get_args(ResponseIncludable)) == set(typing.get_args(Include))


def test_fields_are_known() -> None:
    """Each field of a create call is used, skipped by name, or refused by name."""
    fields = set()
    for params in (ResponseCreateParamsNonStreaming, ResponseCreateParamsStreaming):
        fields |= set(typing.get_type_hints(params))
    assert fields <= set(ResponseRequest.__struct_fields__) | KNOWN.keys()
    assert not set(ResponseRequest.__struct_fields__) & KNOWN.keys()


def test_events_are_the_sdks() -> None:
    """What the grammar has is published."""
    ours = {event for moves in grammar.MOVES.values() for event, _ in moves}
    assert ours <= types_in(ResponseStreamEvent).keys()


@pytest.mark.parametrize("kind", sorted(INPUT))
def test_item_types(kind: str) -> None:
    """B185: a minimal item of each type is read, skipped with a notice, or refused with its name; never anything else."""
    item = sample(INPUT[kind]) | {"type": kind}
    treatment = ITEMS[kind]
    if isinstance(treatment, Refused) or kind == "item_reference":
        with pytest.raises(ValidationError, match=kind) as caught:
            _read(item)
        assert caught.value.parameter is not None and caught.value.parameter.startswith("input[0]")
        return
    messages, notices = _read(item)
    if isinstance(treatment, Skipped):
        assert not messages and any(kind in text for text in notices)
    elif kind not in ("reasoning", "file_search_call"):
        assert isinstance(treatment, Used) and messages and not notices


@pytest.mark.parametrize("kind", sorted(k for k, t in ITEMS.items() if isinstance(t, Used)))
def test_broken_items(kind: str) -> None:
    """Each field of a used item, missing or of a wrong type, is refused with its path; nothing else escapes."""
    treatment = ITEMS[kind]
    assert isinstance(treatment, Used)
    item = sample(INPUT[kind]) | {"type": kind}
    if kind == "item_reference":
        return
    for field in msgspec.structs.fields(treatment.shape):
        for value in (object, 3, {"a": 1}, [3], [{"type": "input_image", "image_url": "data:"}]):
            broken = {k: v for k, v in item.items() if k != field.name}
            if value is not object:
                broken[field.name] = value
            try:
                _read(broken)
            except ValidationError as error:
                assert error.parameter is not None and error.parameter.startswith(f"input[0].{field.name}"), str(error)


@pytest.mark.parametrize("kind", sorted(TOOL_TYPES))
def test_tool_types(kind: str) -> None:
    """B182: a minimal tool of each type is offered to the model or skipped with a notice."""
    notices = Notices()
    tools = read_tools([sample(TOOL_TYPES[kind]) | {"type": kind}], notices)
    if isinstance(TOOLS[kind], Skipped):
        assert not tools.definitions and kind in notices.texts[0]
    else:
        assert tools.definitions and not notices.texts


def test_unknown_tool_types() -> None:
    """B182: a type that nobody has heard of does not refuse the request."""
    notices = Notices()
    tools = read_tools([{"type": "hologram"}, {"type": "function", "name": "f"}], notices)
    assert [tool.name for tool in tools.definitions] == ["f"] and "hologram" in notices.texts[0]
