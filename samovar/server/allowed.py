"""must_be: what msgspec says of a word that is none of those allowed, with these named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

_STEP = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
_NO_SUCH_WORD = re.compile(r"^Invalid enum value (?P<value>.*)$", re.DOTALL)


def must_be(rule: str, kind: type[Any], path: str) -> str:
    """`rule`, msgspec's words, or better ones if a value at `path` of `kind` is none of the few that are allowed."""
    match = _NO_SUCH_WORD.match(rule)
    words = [repr(word) for word in dict.fromkeys(_words(kind, path))] if match else []
    if match is None or not words:
        return rule
    listed = words[0] if len(words) == 1 else f"one of {', '.join(words)}"
    return f"must be {listed}, got {match['value'][:100]}"


def _words(kind: type[Any], path: str) -> Iterator[Any]:
    """The literals that may stand at `path`."""
    found = _options(msgspec.inspect.type_info(kind))
    for step in _STEP.findall(path):
        found = [option for one in found for inner in _inside(one, step) for option in _options(inner)]
    for one in found:
        if isinstance(one, msgspec.inspect.LiteralType):
            yield from one.values


def _options(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    """A union's members; anything else itself. Notes around a type are taken off."""
    if isinstance(kind, msgspec.inspect.Metadata):
        return _options(kind.type)
    return list(kind.types) if isinstance(kind, msgspec.inspect.UnionType) else [kind]


def _inside(kind: msgspec.inspect.Type, step: str) -> list[msgspec.inspect.Type]:
    """The types that a step of a path leads to: a field, or any entry of a list or an object."""
    if isinstance(kind, msgspec.inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == step]
    if isinstance(kind, msgspec.inspect.ListType) and step.startswith("["):
        return [kind.item_type]
    if isinstance(kind, msgspec.inspect.DictType) and step.startswith("["):
        return [kind.value_type]
    return []
