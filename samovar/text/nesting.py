"""How deep free-form data of a request may be nested: what walks it later may recurse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from samovar.errors import ValidationError

MAX_DEPTH = 64
"""Levels of objects and lists in messages, tools, documents and template variables."""


def check_depth(parameter: str, value: Any) -> None:
    """Raise `ValidationError` for data nested deeper than any template or schema needs."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [item for part in level if isinstance(part, (dict, list)) for item in _items(part)]
        if not level:
            return
    raise ValidationError(f"{parameter}: nested deeper than {MAX_DEPTH} levels", parameter=parameter)


def _items(part: dict[str, Any] | list[Any]) -> Iterable[Any]:
    return part.values() if isinstance(part, dict) else part
