"""Grammar of `call:name{key:value}`: a JSON Schema written in this syntax, as far as it can be enforced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from samovar.core.tools import ToolDefinition
from samovar.text.formats.argument_grammar import (
    ANNOTATIONS,
    STRING_WORDS,
    UNIONS,
    free_parameters,
    merged,
    parameters_of,
    refuse,
    size_word,
    string_patterns,
    with_definitions,
)
from samovar.text.formats.argument_values import followed, kinds_of
from samovar.text.formats.tagged_reader import is_name
from samovar.text.lark import Lark

DEEPEST = 12
"""Objects, lists and alternatives within each other that a schema may spell out."""
ANY_DEPTH = 3
"""Objects and lists within each other, where a schema allows anything."""
ARRAY_WORDS = ANNOTATIONS | {"type", "items", "minItems", "maxItems", "enum", "const"}
SCALARS = frozenset(("number", "integer", "boolean", "null"))


class CallLiteralGrammar:
    """Writes the calls of one request; `quote` opens and closes strings."""

    def __init__(self, lark: Lark, quote: str) -> None:
        self._lark = lark
        self._quote = quote
        self._tool = ToolDefinition(name="")
        self._anything: dict[int, str] = {}

    def call(self, tool: ToolDefinition) -> str:
        """One call of a tool, without marks."""
        self._tool = tool
        if not is_name(tool.name):
            refuse(f"the name {tool.name!r}", tool.name)
        schemas, required = parameters_of(tool)
        is_free = free_parameters(tool) is not None
        members = self._of_kind("object", tool.parameters, 0) if is_free else self._members(schemas, required, 0)
        return self._lark.rule(f"call_{tool.name}", self._lark.seq(self._lark.text(f"call:{tool.name}"), members))

    def _members(self, schemas: Mapping[str, Any], required: Sequence[str], depth: int) -> str:
        """An object's braces and what is between: required members first, commas only between two."""
        lark = self._lark
        rules = []
        for key, schema in schemas.items():
            if not is_name(key) or set(key) & set(":,"):
                refuse(f"a parameter named {key!r}", self._tool.name)
            value = self.value(schema, depth)
            rules.append(lark.rule(f"{self._tool.name}_{key}", lark.seq(lark.text(f"{key}:"), value)))
        comma = lark.text(",")
        needed, spare = rules[: len(required)], rules[len(required) :]
        if needed:
            parts = [part for rule in needed for part in (comma, rule)][1:]
            inner = lark.seq(*parts, *(lark.optional(lark.seq(comma, rule)) for rule in spare))
        elif spare:
            starts = [
                lark.seq(rule, *(lark.optional(lark.seq(comma, later)) for later in spare[at + 1 :]))
                for at, rule in enumerate(spare)
            ]
            inner = lark.optional(lark.any_of(*starts))
        else:
            inner = lark.text("")
        return lark.seq(lark.text("{"), inner, lark.text("}"))

    def value(self, schema: Any, depth: int) -> str:
        """A value of this schema."""
        root, name = self._tool.parameters, self._tool.name
        schema = followed(schema, root)
        schema = schema if isinstance(schema, Mapping) else {}
        if depth > DEEPEST:
            refuse("a schema that is so deep, or refers to itself", name)
        if isinstance(schema.get("allOf"), list):
            together: Mapping[str, Any] = {word: value for word, value in schema.items() if word != "allOf"}
            for part in schema["allOf"]:
                together = merged(together, followed(part, root), name)
            return self.value(together, depth + 1)
        for word in UNIONS:
            if isinstance(schema.get(word), list) and schema[word]:
                beside = {other: value for other, value in schema.items() if other != word}
                parts = [merged(beside, followed(part, root), name) for part in schema[word]]
                return self._lark.any_of(*(self.value(part, depth + 1) for part in parts))
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            kinds = kinds_of(schema, root)
            fitting = [value for value in values if kinds_of({"const": value}, root) <= kinds]
            if not fitting:
                refuse("a schema of which no value can be written", name)
            return self._lark.any_of(*(self._literal(value) for value in fitting))
        return self._lark.any_of(*(self._of_kind(kind, schema, depth) for kind in sorted(kinds_of(schema, root))))

    def _of_kind(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        if kind in SCALARS:
            return self._lark.json(with_definitions({**schema, "type": kind}, self._tool.parameters))
        if kind == "string":
            self._only(schema, STRING_WORDS, kind)
            return self._string(tuple(string_patterns(schema, self._tool.name)))
        if kind == "array":
            self._only(schema, ARRAY_WORDS, kind)
            item = self.value(schema["items"], depth + 1) if "items" in schema else self._any(ANY_DEPTH)
            least, most = (size_word(schema, word, self._tool.name) for word in ("minItems", "maxItems"))
            return self._list(item, least or 0, most)
        if "properties" in schema or "required" in schema:
            members, required = parameters_of(ToolDefinition(name=self._tool.name, parameters=schema))
            return self._members(members, required, depth + 1)
        others = schema.get("additionalProperties", {})
        self._only(schema, ANNOTATIONS | {"type", "additionalProperties", "required"}, kind)
        if others is False:
            return self._lark.text("{}")
        return self._object(
            self.value(others, depth + 1) if isinstance(others, Mapping) and others else self._any(ANY_DEPTH)
        )

    def _only(self, schema: Mapping[str, Any], words: frozenset[str], kind: str) -> None:
        if len(kinds_of(schema, self._tool.parameters)) > 1:
            words = words | STRING_WORDS | ARRAY_WORDS | {"properties", "required", "additionalProperties"}
        for word in sorted(schema.keys() - words):
            refuse(f"keyword {word!r} of type {kind!r}", self._tool.name)

    def _string(self, patterns: tuple[str, ...] = ()) -> str:
        text = self._lark.matching_until(patterns, self._quote, without=self._quote)
        return self._lark.seq(self._lark.text(self._quote), text)

    def _list(self, item: str, least: int = 0, most: int | None = None) -> str:
        if most is not None and most < least:
            refuse("a list whose 'maxItems' is below its 'minItems'", self._tool.name)
        items = self._lark.many(item, least=least, most=most, separator=self._lark.text(","))
        return self._lark.seq(self._lark.text("["), items, self._lark.text("]"))

    def _object(self, value: str) -> str:
        member = self._lark.seq(self._lark.regex("[A-Za-z_][A-Za-z0-9_]*"), self._lark.text(":"), value)
        return self._lark.seq(
            self._lark.text("{"), self._lark.many(member, separator=self._lark.text(",")), self._lark.text("}")
        )

    def _any(self, depth: int) -> str:
        """Any value, of at most so many objects and lists within each other."""
        if depth not in self._anything:
            scalar = self._lark.json({"type": ["boolean", "null", "number"]})
            ways = [self._string(), scalar]
            if depth:
                inner = self._any(depth - 1)
                ways += [self._list(inner), self._object(inner)]
            self._anything[depth] = self._lark.rule(f"any_{depth}", self._lark.any_of(*ways))
        return self._anything[depth]

    def _literal(self, value: object) -> str:
        """Exactly this value."""
        lark = self._lark
        if isinstance(value, str):
            if self._quote in value:
                refuse(f"the value {value!r}", self._tool.name)
            return lark.seq(
                lark.text(self._quote), lark.plain(value) if value else lark.text(""), lark.text(self._quote)
            )
        if isinstance(value, list | Mapping):
            refuse(f"the value {value!r}", self._tool.name)
        return lark.json({"enum": [value]})
