"""Arguments written as raw text: their JSON, by the types a tool's schema allows for them.

The rule models are taught: a string is written as it is, everything else as JSON. What does not parse as one of the
allowed types is given as a string.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn, TypeAlias

from samovar.core.tools import ToolDefinition
from samovar.text.formats.python_text import PythonText

Kinds: TypeAlias = frozenset[str]
"""JSON Schema's names of types; "number" covers integers."""

ANY: Final[Kinds] = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
STRING: Final[Kinds] = frozenset(("string",))
LONGEST_SCALAR = 300
"""Characters; what is longer and may be a string is one, unless it begins as an array or object."""
MAX_DEPTH = 16
"""References and alternatives followed within each other; what lies deeper may be of any type."""

_KIND_OF = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_WORDS = {"true": "boolean", "false": "boolean", "null": "null", "True": "boolean", "False": "boolean", "None": "null"}
"""Templates print some values with Python's names, and models learn them from there."""
_JSON_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMERIC = frozenset("0123456789+-.eE")
_CONTAINERS = {"{": "object", "[": "array"}


class ParameterKinds:
    """The types that the schema of a tool allows for each of its parameters; all types where it says nothing."""

    def __init__(self, definition: ToolDefinition | None) -> None:
        self._root: Mapping[str, Any] = definition.parameters if definition else {}
        self._known: dict[str, Kinds] = {}

    def of(self, key: str) -> Kinds:
        """The types allowed for parameter `key`."""
        if key not in self._known:
            self._known[key] = kinds_of(parameter_schema(self._root, key), self._root)
        return self._known[key]


def parameter_schema(root: Mapping[str, Any], key: str) -> Any:
    """The schema of one parameter; {} where there is none."""
    schema = followed(root, root)
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    others = schema.get("additionalProperties") if isinstance(schema, Mapping) else None
    return others if isinstance(others, Mapping) else {}


def followed(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema behind a `$ref` within the same document; {} where it leads nowhere."""
    for _ in range(MAX_DEPTH):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            return schema
        found: Any = root if reference.startswith("#") else None
        for part in reference.removeprefix("#").split("/")[1:]:
            name = part.replace("~1", "/").replace("~0", "~")
            found = found.get(name) if isinstance(found, Mapping) else None
        beside = {name: value for name, value in schema.items() if name != "$ref"}
        schema = {**found, **beside} if isinstance(found, Mapping) else beside
    return {}


def kinds_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> Kinds:
    """The types a schema allows, as far as its types, values and alternatives tell."""
    schema = followed(schema, root)
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ANY
    allowed = ANY
    declared = schema.get("type")
    names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
    named = frozenset(name for name in names if isinstance(name, str)) & ANY
    if named:
        allowed = named | {"null"} if schema.get("nullable") is True else named
    if "const" in schema:
        allowed = _within(allowed, frozenset((_kind(schema["const"]),)))
    if isinstance(schema.get("enum"), list):
        allowed = _within(allowed, frozenset(_kind(value) for value in schema["enum"]))
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list) and schema[word]:
            union: Kinds = frozenset().union(*(kinds_of(part, root, depth + 1) for part in schema[word]))
            allowed = _within(allowed, union)
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        allowed = _within(allowed, kinds_of(part, root, depth + 1))
    return allowed or ANY


def _within(left: Kinds, right: Kinds) -> Kinds:
    """The types in both; an integer is a number too."""
    both = left & right
    if ("integer" in left and "number" in right) or ("number" in left and "integer" in right):
        both |= {"integer"}
    return both


def _kind(value: object) -> str:
    return "null" if value is None else _KIND_OF.get(type(value), "string")


class ArgumentValue:
    """The JSON text of one value whose raw text comes in pieces. A string goes out as it comes; all else at its end."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self._is_text = kinds == STRING
        self._is_container = False
        self._is_numeric = False
        self._length = 0
        self._held: list[str] = []

    @property
    def may_be_text(self) -> bool:
        """Whether the value is or may yet prove to be a string."""
        return self._is_text or ("string" in self._kinds and not self._is_container)

    def begin(self) -> str:
        """What is certain before the first character."""
        return '"' if self._is_text else ""

    def may_begin_container(self, char: str) -> bool:
        """Whether a value with this first character is read as an array or object, when it parses as one."""
        return not self._is_text and _CONTAINERS.get(char) in self._kinds

    def feed(self, text: str) -> str:
        """The JSON text that became certain."""
        if self._is_text:
            return escaped(text)
        self._held.append(text)
        self._length += len(text)
        if self._is_container or "string" not in self._kinds:
            return ""
        if self._is_numeric and _NUMERIC.issuperset(text) and self._length <= LONGEST_SCALAR:
            return ""
        head = "".join(self._held)
        self._is_container = self.may_begin_container(head.lstrip()[:1])
        if may_be_other(head, self._kinds):
            self._held = [head]
            self._is_numeric = bool(head.strip()) and _NUMERIC.issuperset(head)
            return ""
        self._is_text = True
        self._held.clear()
        return '"' + escaped(head)

    def end(self) -> str:
        """The rest of the JSON text."""
        return '"' if self._is_text else json_text("".join(self._held), self._kinds)


def may_be_other(text: str, kinds: Kinds) -> bool:
    """Whether the beginning of a value may still turn out as something else than a string."""
    bare = text.lstrip()
    if bare[:1] in _CONTAINERS:
        return _CONTAINERS[bare[:1]] in kinds
    if len(text) > LONGEST_SCALAR:
        return False
    bare = bare.rstrip()
    if not bare:
        return True
    if any(word.startswith(bare) and kind in kinds for word, kind in _WORDS.items()):
        return True
    return bool(kinds & {"integer", "number"}) and _NUMERIC.issuperset(bare)


def json_text(text: str, kinds: Kinds) -> str:
    """A whole value's JSON: as one of the types if it parses as that, otherwise as a string."""
    bare = text.strip(" \t\r\n")
    if "string" in kinds and not may_be_other(text, kinds):
        return quoted(text)
    if _WORDS.get(bare) in kinds:
        return _JSON_WORDS.get(bare, bare)
    for strict in (True, False):  # line breaks within strings are what models get wrong most
        try:
            value = json.loads(bare, strict=strict, parse_int=_whole, parse_constant=_no_number)
        except (ValueError, RecursionError):
            continue
        kind = _kind(value)
        is_quoted = kind == "string" and "string" not in kinds  # no string was expected: not one with its quotes
        fits = kind in kinds or is_quoted or (kind == "integer" and "number" in kinds)
        if fits or (kind == "number" and "integer" in kinds and value.is_integer()):
            return bare if strict else json.dumps(json.loads(bare, strict=False), ensure_ascii=False)
        break
    return _from_python(bare, kinds) or quoted(text)


def _from_python(text: str, kinds: Kinds) -> str | None:
    """The JSON of a list or dict as Python prints it, which is what some templates show models; None if it is none."""
    if _CONTAINERS.get(text[:1]) not in kinds:
        return None
    reader = PythonText()
    if reader.feed(written := f"(_={text})") < len(written) or not reader.is_done:
        return None
    try:
        return json.dumps(json.loads(reader.take())["_"], ensure_ascii=False)
    except (ValueError, RecursionError):
        return None


def escaped(text: str) -> str:
    """Text as it stands within a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def quoted(text: str) -> str:
    """A JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _whole(digits: str) -> int:
    """Some whole number: the digits themselves go on as they are, however many."""
    return len(digits)


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
