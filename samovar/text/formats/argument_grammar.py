"""What a parameter may be written as, where strings are raw text and all else is JSON: alternatives of three kinds.

The inverse of `argument_values`: every text of an alternative is read back as a value that the schema allows. What
cannot be promised is refused by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

from samovar.core.tools import ToolDefinition
from samovar.errors import ValidationError
from samovar.text.formats.argument_values import MAX_DEPTH, Kinds, followed, json_text, kinds_of, quoted

ANNOTATIONS = frozenset(
    "title description default examples deprecated readOnly writeOnly $comment $schema $id $anchor $defs definitions "
    "format contentEncoding contentMediaType nullable strict".split()
)
"""Keywords that allow and forbid nothing (of a string, `format` is a remark, as JSON Schema has it by default)."""
OBJECT_WORDS = ANNOTATIONS | {"type", "properties", "required", "additionalProperties"}
STRING_WORDS = ANNOTATIONS | {"type", "enum", "const", "pattern", "minLength", "maxLength"}
UNIONS = ("anyOf", "oneOf")

_BEGINS_NO_CONTAINER = r"(?s:[^\s\[{].*)?"
_BEGINS_NO_NUMBER = r"(?s:[^\s\[{0-9-].*)?"


@dataclass(frozen=True, slots=True)
class Literal:
    """Exactly this raw text."""

    text: str


@dataclass(frozen=True, slots=True)
class Free:
    """Raw text that every one of these patterns matches whole."""

    patterns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Json:
    """A JSON value of this schema."""

    schema: Mapping[str, Any]


Alternative: TypeAlias = Literal | Free | Json


def parameters_of(tool: ToolDefinition) -> tuple[dict[str, Any], list[str]]:
    """The schemas of a tool's parameters, required ones first, and the names of those. Refuses what is not such a list."""
    root = tool.parameters
    schema = followed(root, root)
    extra = sorted(word for word in schema if word not in OBJECT_WORDS)
    if extra:
        refuse(f"keyword {extra[0]!r} next to the parameters themselves", tool.name)
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not _is_list_of_names(required):
        refuse("'properties' that are no object, or 'required' that is no list of names", tool.name)
    schemas = {name: properties.get(name, {}) for name in [*properties, *required]}
    never = next((name for name in required if schemas[name] is False), None)
    if never is not None:
        refuse(f"the required parameter {never!r} without any value", tool.name)
    possible = [name for name, value in schemas.items() if value is not False]
    ordered = sorted(possible, key=lambda name: name not in required)
    return {name: schemas[name] for name in ordered}, [name for name in ordered if name in required]


def _is_list_of_names(value: object) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(name, str) for name in value)


def size_word(schema: Mapping[str, Any], word: str, tool: str) -> int | None:
    """The value of a keyword that bounds a size; refused unless it is a count."""
    value = schema.get(word)
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    refuse(f"{word!r} of {value!r}", tool)


def free_parameters(tool: ToolDefinition) -> Any | None:
    """The schema of each of any parameters, where a tool does not say which there are; None where it does."""
    schema = followed(tool.parameters, tool.parameters)
    others = schema.get("additionalProperties", {})
    if "properties" in schema or "required" in schema or others is False:
        return None
    return others if isinstance(others, Mapping) else {}


def alternatives(schema: Any, root: Mapping[str, Any], tool: str) -> list[Alternative]:
    """All ways to write a value of this schema."""
    parts = list(_leaves(schema, root, tool, 0))
    kinds: Kinds = frozenset().union(*(kinds_of(part, root) for part in parts))
    found: list[Alternative] = []
    for part in parts:
        found.extend(_of_leaf(part, root, kinds, tool))
    if not found:
        refuse("a schema of which no value can be written", tool)
    return list(dict.fromkeys(found)) if all(isinstance(way, Literal | Free) for way in found) else found


def _leaves(schema: Any, root: Mapping[str, Any], tool: str, depth: int) -> Iterator[Mapping[str, Any]]:
    """The alternatives of a schema that may be a string, each with what holds for all of them."""
    schema = followed(schema, root)
    if not isinstance(schema, Mapping) or "string" not in kinds_of(schema, root):
        yield schema if isinstance(schema, Mapping) else {}
        return
    if depth > MAX_DEPTH:
        refuse("alternatives that lie too deep", tool)
    word = next((word for word in ("allOf", *UNIONS) if isinstance(schema.get(word), list) and schema[word]), None)
    if word is None:
        yield schema
        return
    beside = {name: value for name, value in schema.items() if name != word}
    if word in UNIONS:
        for part in schema[word]:
            yield from _leaves(merged(beside, followed(part, root), tool), root, tool, depth + 1)
        return
    for part in schema[word]:
        beside = merged(beside, followed(part, root), tool)
    yield from _leaves(beside, root, tool, depth + 1)


def merged(left: Mapping[str, Any], right: Any, tool: str) -> dict[str, Any]:
    """Two schemas that both hold; refused where they say different things with one keyword."""
    right = right if isinstance(right, Mapping) else {}
    for word in left.keys() & right.keys() - ANNOTATIONS:
        if left[word] != right[word]:
            refuse(f"two values of {word!r} that hold at once", tool)
    return {**left, **right}


def _of_leaf(schema: Mapping[str, Any], root: Mapping[str, Any], kinds: Kinds, tool: str) -> Iterator[Alternative]:
    own = kinds_of(schema, root)
    others = sorted(own - {"string"})
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        kept = [value for value in values if not isinstance(value, str)]
        for value in values:
            if isinstance(value, str) and json_text(value, kinds) == quoted(value) and "string" in own:
                yield Literal(value)
        if kept and others:
            yield Json({**schema, "enum": kept} if "enum" in schema else schema)
        return
    if "string" not in own:
        yield Json(with_definitions(schema, root))
        return
    unknown = sorted(word for word in schema if word not in STRING_WORDS) if not others else []
    if unknown:
        refuse(f"keyword {unknown[0]!r} of a string", tool)
    patterns = list(string_patterns(schema, tool))
    if kinds & {"array", "object"}:
        patterns.append(_BEGINS_NO_CONTAINER)
    if kinds & {"integer", "number"}:
        patterns.append(_BEGINS_NO_NUMBER)
    yield Free(tuple(patterns))
    if others:
        words = {name: value for name, value in schema.items() if name not in ("pattern", "minLength", "maxLength")}
        yield Json(with_definitions({**words, "type": others}, root))


def string_patterns(schema: Mapping[str, Any], tool: str) -> Iterator[str]:
    """A string's keywords as patterns of its whole text."""
    least, most = size_word(schema, "minLength", tool) or 0, size_word(schema, "maxLength", tool)
    if most is not None and most < least:
        refuse("a string whose 'maxLength' is below its 'minLength'", tool)
    if least or most is not None:
        yield f"(?s:.{{{least},{'' if most is None else most}}})"
    if "pattern" in schema:
        yield _whole_pattern(str(schema["pattern"]))


def _whole_pattern(pattern: str) -> str:
    """JSON Schema's pattern may match anywhere, and its classes are those of ASCII."""
    begins = pattern.startswith("^")
    ends = pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[begins : len(pattern) - ends].replace("\\d", "[0-9]").replace("\\w", "[A-Za-z0-9_]")
    return ("" if begins else "(?s:.*)") + f"(?:{inner})" + ("" if ends else "(?s:.*)")


def with_definitions(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema taken out of its document, with the parts of it that references name."""
    shared = {word: root[word] for word in ("$defs", "definitions") if word in root}
    return {**shared, **schema}


def refuse(what: str, tool: str) -> NoReturn:
    """Refuse a tool whose calls cannot be enforced in a format."""
    message = f"tools: the call format of this model cannot enforce {what} (function {tool!r}); simplify its parameters"
    raise ValidationError(message, parameter="tools", value=tool)
