"""Used, Skipped, Refused: what becomes of each type of the published schema, for input items and for tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from samovar.errors import ValidationError
from samovar.server.responses.notices import Notices

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Used:
    """The type is read, as a `shape`."""

    shape: type[msgspec.Struct]


@dataclass(frozen=True, slots=True)
class Skipped:
    """The type is left out, with a notice that says `reason`: without it the conversation still says the same."""

    reason: str

    def note(self, what: str, notices: Notices) -> None:
        """Tell the client."""
        notices.add(f"{what} was skipped: {self.reason}")


@dataclass(frozen=True, slots=True)
class Refused:
    """The type is answered with 400; `remedy` tells the caller what to do."""

    remedy: str

    def refuse(self, what: str, where: str) -> None:
        """Raise `ValidationError`."""
        raise ValidationError(f"{where}: {what} is not supported here: {self.remedy}", parameter=where)


Treatment = Used | Skipped | Refused


def read(raw: Any, shape: type[T], where: str) -> T:
    """Plain values -> a record, or a `ValidationError` that names the field as the caller spelled it."""
    try:
        return msgspec.convert(raw, type=shape)
    except msgspec.ValidationError as error:
        rule, _, path = str(error).partition(" - at `$")
        field = where + path.rstrip("`")
        if rule.startswith("Object missing required field"):
            field, rule = f"{field}.{rule.split('`')[1]}", "is required"
            raise ValidationError(f"{field} {rule}", parameter=field) from None
        raise ValidationError(f"{field}: {rule}", parameter=field) from None


def type_of(raw: Any, where: str) -> str:
    """The `type` of an object; "" if it has none. Raises `ValidationError` for what is no object, or has no such type."""
    if not isinstance(raw, dict):
        raise ValidationError(f"{where} must be an object, got {str(raw)[:100]!r}", parameter=where)
    kind = raw.get("type", "")
    if not isinstance(kind, str):
        raise ValidationError(f"{where}.type must be a string, got {str(kind)[:100]!r}", parameter=f"{where}.type")
    return kind
