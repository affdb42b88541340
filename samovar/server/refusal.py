"""Refusal: a field that this build has no use for. Its harmless values are accepted; any other is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from samovar.errors import ValidationError

Fields = Mapping[str, msgspec.Raw]


@dataclass(frozen=True, slots=True)
class Refusal:
    """`accepts(value, fields)` says whether the value asks for nothing; `remedy` tells the caller what to do."""

    accepts: Callable[[Any, Fields], bool]
    remedy: str

    def check(self, name: str, value: Any, fields: Fields) -> None:
        """Raise `ValidationError` naming the field unless the value asks for nothing."""
        if not self.accepts(value, fields):
            raise ValidationError(f"{name} is not supported by this server: {self.remedy}", parameter=name)


def empty(value: Any, fields: Fields) -> bool:
    """Accepts values that say nothing."""
    return value is None or value == [] or value == {} or value == ""


def absent_or(*harmless: Any) -> Callable[[Any, Fields], bool]:
    """Accepts null and these values."""

    def accepts(value: Any, fields: Fields) -> bool:
        return value is None or any(type(value) is type(known) and value == known for known in harmless)

    return accepts
