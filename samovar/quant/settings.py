"""Settings: a quantization_config, read field by field. What has the wrong type or an unknown value is refused by name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from samovar.errors import CheckpointError


class Settings:
    """A JSON object; `where` says which one, for messages."""

    def __init__(self, values: Mapping[str, Any], where: str = "quantization_config") -> None:
        self.values, self.where = values, where

    def refuse(self, field: str, why: str) -> CheckpointError:
        """The error for a value that cannot be used."""
        return CheckpointError(f"{self.where}: {field} {self.values.get(field)!r} {why}")

    def has(self, field: str) -> bool:
        """Whether the field says anything."""
        return self.values.get(field) not in (None, {}, [], "")

    def integer(self, *fields: str, otherwise: int | None = None) -> int:
        """The first of these fields that is there."""
        field = next((f for f in fields if self.values.get(f) is not None), fields[0])
        value = self.values.get(field, otherwise)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(field, "must be an integer")
        return value

    def flag(self, field: str, otherwise: bool) -> bool:
        """True or false."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, bool):
            raise self.refuse(field, "must be true or false")
        return otherwise if value is None else value

    def text(self, field: str, otherwise: str = "") -> str:
        """A string."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, str):
            raise self.refuse(field, "must be a string")
        return otherwise if value is None else value

    def names(self, *fields: str) -> list[str]:
        """All strings of these lists."""
        found: list[str] = []
        for field in fields:
            value = self.values.get(field)
            value = [value] if isinstance(value, str) else [] if value is None else value
            if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
                raise self.refuse(field, "must be a list of strings")
            found += value
        return found

    def part(self, field: str) -> Settings | None:
        """An object inside of this one; None if it says nothing."""
        value = self.values.get(field)
        if value is not None and not isinstance(value, Mapping):
            raise self.refuse(field, "must be an object")
        return Settings(value, f"{self.where}.{field}") if value else None

    def parts(self, field: str) -> dict[str, Settings]:
        """Every object of an object, by its name."""
        inner = self.part(field)
        found = {name: inner.part(name) for name in inner.values} if inner is not None else {}
        return {
            name: value if value is not None else Settings({}, f"{self.where}.{field}.{name}")
            for name, value in found.items()
        }

    def only(self, field: str, *allowed: object) -> None:
        """Refuse every value but these; a field that is not there is allowed."""
        value = self.values.get(field)
        if value is not None and value not in allowed:
            raise self.refuse(field, f"is not supported: only {', '.join(map(repr, allowed))}")


def names_part(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of `patterns` is a run of whole dotted parts of `name`: "lm_head", or "layers.0.mlp"."""
    return any(f".{pattern}." in f".{name}." for pattern in patterns)


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether `name` is one of `patterns`, or matches one that begins with `re:`."""
    return any(
        re.match(pattern[3:], name) is not None if pattern.startswith("re:") else pattern == name
        for pattern in patterns
    )


def under_glob(name: str, patterns: Iterable[str]) -> bool:
    """Whether `name`, or something that it lies in, is matched by one of `patterns`, which may hold `*`."""
    parts = name.split(".")
    inside = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(prefix, pattern) for pattern in patterns for prefix in inside)
