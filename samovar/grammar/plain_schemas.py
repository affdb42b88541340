"""plain_grammar: a grammar that is one plain JSON Schema -> the same language as EBNF, for xgrammar. All others: None.

xgrammar's own reading of JSON Schema is not used: it lets invalid documents through. What is written here is a closed
list of forms, each of them a few lines of a context-free grammar that says what llguidance makes of the same schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from samovar.grammar.json_source import ESCAPES, WHITESPACE

LONGEST = 16 * 1024
"""Characters of EBNF. A grammar compiles in the engine, so it must not take long."""

MOST_ITEMS = 64
"""`minItems` and `maxItems`: each item is written out."""

MOST_OPTIONAL = 8
"""Optional properties of one object: with more of them xgrammar is the slower one."""

MOST_OBJECTS = 4
"""Objects in one `anyOf`, which are all followed at once, and at most one array: with sixty, a mask took 60 ms."""

_HEAD = "%llguidance {}\nstart: %json "
_OPTIONS = {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES}
_BLANKS = {WHITESPACE: r'(("" | " " | "\n" [ \t]{0,20}))', None: '("")'}
_BASE = r"""
char ::= [\x20-\x21\x23-\x5b\x5d-\x7e\x80-\ud7ff\ue000-\U0010ffff]
inside ::= ("\"" | char inside | "\\" [nrbtf\\"] inside) (=([ \n\t]* [,}\]]))
string ::= "\"" inside
integer ::= "-"? ("0" | [1-9] [0-9]*)
number ::= integer ("." [0-9]+)? ([eE] [-+]? [0-9]+)?
boolean ::= "true" | "false"
null ::= "null"
"""
"""Characters are listed since xgrammar takes halves of them for the rest. What is behind `=` may follow a string that is
a value: it saves xgrammar most of its work, and decides nothing."""

_SCALARS = ("string", "integer", "number", "boolean", "null")
_OF_OBJECTS = {"properties", "required", "additionalProperties"}
_OF_ARRAYS = {"items", "minItems", "maxItems"}


class _NotPlain(Exception):
    """The schema says something that is not on the list."""


def plain_grammar(grammar: str) -> str | None:
    """The grammar as EBNF, if all of it is a schema of typed objects, arrays, scalars, constants and `anyOf`."""
    if not grammar.startswith(_HEAD) or len(grammar) > LONGEST:
        return None
    try:
        schema = json.loads(grammar[len(_HEAD) :])  # refuses whatever follows the schema
    except (ValueError, RecursionError):
        return None
    if not isinstance(schema, dict):
        return None
    options = schema.pop("x-guidance", {})
    blank = _BLANKS.get(options.pop("whitespace_pattern", None))
    if options != _OPTIONS or blank is None:
        return None
    writer = _Writer()
    try:
        root = writer.value(schema)
    except _NotPlain:
        return None
    text = f"root ::= {root}\nblank ::= {blank}{_BASE}" + "".join(f"{line}\n" for line in writer.rules)
    return text if len(text) <= LONGEST else None


class _Writer:
    def __init__(self) -> None:
        self.rules: list[str] = []

    def rule(self, expression: str) -> str:
        """The name of a new rule."""
        name = f"r{len(self.rules)}"
        self.rules.append(f"{name} ::= {expression}")
        return name

    def value(self, schema: Any) -> str:
        """An expression for the values of a schema."""
        if not isinstance(schema, Mapping):
            raise _NotPlain
        keywords = set(schema)
        if keywords == {"anyOf"}:
            return self._options(schema["anyOf"])
        types = _types(schema)
        if keywords - {"type"} in ({"enum"}, {"const"}):
            return _constants(schema.get("enum", [schema.get("const")]), types if "type" in schema else None)
        known = {"type"} | (_OF_OBJECTS if "object" in types else set()) | (_OF_ARRAYS if "array" in types else set())
        if not types or keywords - known:
            raise _NotPlain
        return _any_of([self._of_type(name, schema) for name in types])

    def _options(self, options: Sequence[Any]) -> str:
        kinds = [kind for option in options for kind in _types_within(option)]
        if kinds.count("object") > MOST_OBJECTS or kinds.count("array") > 1:
            raise _NotPlain
        return _any_of([self.value(option) for option in options])

    def _of_type(self, name: str, schema: Mapping[str, Any]) -> str:
        if name == "object":
            return self._object(schema)
        if name == "array":
            return self._array(schema)
        if name not in _SCALARS:
            raise _NotPlain
        return name

    def _object(self, schema: Mapping[str, Any]) -> str:
        """Properties in their order, each at most once, and no others."""
        properties, required = schema.get("properties", {}), set(schema.get("required", ()))
        if schema.get("additionalProperties") is not False or required - set(properties):
            raise _NotPlain
        if len(properties) - len(required) > MOST_OPTIONAL:
            raise _NotPlain
        if not properties:
            return '"{" blank "}"'
        first: list[str] = []  # what the object may begin with
        rest = ""  # what may follow a property
        is_optional = True  # nothing is required from here on
        for name, inner in reversed(properties.items()):
            pair = self.rule(f'{_quoted(json.dumps(name, ensure_ascii=False))} blank ":" blank {self.value(inner)}')
            begin = f"{pair} {rest}"
            follow = f'blank "," blank {pair}'
            if name in required:
                first, is_optional = [begin], False
                rest = self.rule(f"{follow} {rest}")
            else:
                first.insert(0, begin)
                rest = self.rule(f"({follow})? {rest}")
        some = f"{_any_of(first)} blank"
        return f'"{{" blank ({some})? "}}"' if is_optional else f'"{{" blank {some} "}}"'

    def _array(self, schema: Mapping[str, Any]) -> str:
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if "items" not in schema or max(least, most or 0) > MOST_ITEMS:
            raise _NotPlain
        if most == 0:
            return '"[" blank "]"'
        item = self.rule(self.value(schema["items"]))
        more = self.rule(f'blank "," blank {item}')
        end = "" if most is None else most - 1
        some = f"{item} {more}{{{max(least - 1, 0)},{end}}} blank"
        return f'"[" blank {some} "]"' if least else f'"[" blank ({some})? "]"'


def _types(schema: Mapping[str, Any]) -> list[str]:
    named = schema.get("type", [])
    return [named] if isinstance(named, str) else list(named)


def _types_within(schema: Any) -> list[str]:
    """The types named by a schema and by the options of its `anyOf`."""
    if not isinstance(schema, Mapping):
        return []
    inner = [kind for option in schema.get("anyOf", ()) for kind in _types_within(option)]
    return _types(schema) + inner


def _constants(values: Sequence[Any], types: Sequence[str] | None) -> str:
    found = []
    for value in values:
        kind = _kind(value)
        if types is None or kind in types or (kind == "integer" and "number" in types):
            found.append(_quoted(json.dumps(value, ensure_ascii=False)))
    if not found:
        raise _NotPlain
    return _any_of(found)


def _kind(value: Any) -> str:
    """The type of a constant with one spelling."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if value is None or isinstance(value, str):
        return "null" if value is None else "string"
    raise _NotPlain


def _any_of(options: Sequence[str]) -> str:
    return f"({' | '.join(dict.fromkeys(options))})"


def _quoted(text: str) -> str:
    """Exactly this text. JSON has no control characters of its own left."""
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
