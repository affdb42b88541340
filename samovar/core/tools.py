"""Tools a model may call, and the calls it makes: the same records for every API."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolDefinition:
    """One function a model may call. `parameters` is the JSON Schema of its arguments object ({}: any object).

    With `strict`, arguments are enforced by a grammar also where the model is free whether to call at all.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False


@dataclass(frozen=True, slots=True)
class NamedTool:
    """The choice of exactly this tool."""

    name: str


ToolChoice: TypeAlias = Literal["none", "auto", "required"] | NamedTool


@dataclass(slots=True)
class ToolCallDelta:
    """News of tool call `index` (0, 1, ... within its choice).

    The first delta of a call has `call_id` and `name`; later ones only add to `arguments`. The pieces of `arguments` of
    one call, joined, are a JSON object if the call was complete, and a beginning of one if generation was cut.
    """

    index: int
    call_id: str | None = None
    name: str | None = None
    arguments: str = ""
