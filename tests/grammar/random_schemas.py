"""Schemas made by chance out of everything that is enforced."""

from __future__ import annotations

import random
from typing import Any

NAMES = ("a", "b", "name", 'qu"ote', "é", "x/y", "p~q", "line\n", "", "a.b", "😀")
PATTERNS = (
    "^a",
    "b$",
    "^[a-z]{1,4}$",
    "^\\d{2}(-\\d)?$",
    "[^x]y?",
    "a|b",
    "^\\w+@\\w+$",
    "^(ab)*$",
    "^$",
    "\\s",
    "^.{2,3}$",
)
FORMATS = ("date", "date-time", "ipv4", "ipv6", "uuid", "email", "hostname")


class SchemaMaker:
    """Makes schemas from one random source."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._definitions: dict[str, Any] = {}

    def document(self) -> dict[str, Any]:
        self._definitions = {}
        root = self._schema(3)
        for _ in range(self._chance.choice((0, 0, 1, 2))):
            name = f"d {len(self._definitions)}~/%"
            self._definitions[name] = True
            self._definitions[name] = self._schema(2)
        return {**root, "$defs": self._definitions} if self._definitions else root

    def _some(self, names: tuple[str, ...], most: int) -> list[str]:
        return self._chance.sample(names, self._chance.randint(0, most))

    def _schema(self, depth: int) -> dict[str, Any]:
        makers = [self._string, self._number, self._integer, self._constant, self._plain]
        if depth > 0:
            makers += [self._object, self._object, self._array, self._any_of, self._all_of, self._one_of, self._map]
        if self._definitions:
            makers.append(self._reference)
        return self._chance.choice(makers)(depth - 1)

    def _plain(self, depth: int) -> dict[str, Any]:
        kinds = ["null", "boolean", "integer", "number", "string"]
        return {"type": self._chance.choice([*kinds, self._chance.sample(kinds, 2)]), "title": "uniqueItems"}

    def _string(self, depth: int) -> dict[str, Any]:
        kind = self._chance.randint(0, 4)
        low = self._chance.randint(0, 4)
        if kind == 0:
            return {"type": "string", "minLength": low, "maxLength": low + self._chance.randint(0, 5)}
        if kind == 1:
            return {"type": "string", "pattern": self._chance.choice(PATTERNS)}
        if kind == 2:
            return {"type": "string", "format": self._chance.choice(FORMATS)}
        if kind == 3:
            return {"type": "string", "pattern": self._chance.choice(PATTERNS), "maxLength": low + 2}
        return {"pattern": self._chance.choice(PATTERNS), "minimum": 3, "maxItems": 2}

    def _number(self, depth: int) -> dict[str, Any]:
        low = self._chance.choice((0, -3, 1.5, -0.25, 1000))
        schema: dict[str, Any] = {"type": "number"}
        schema[self._chance.choice(("minimum", "exclusiveMinimum"))] = low
        if self._chance.random() < 0.7:
            schema[self._chance.choice(("maximum", "exclusiveMaximum"))] = low + self._chance.choice((1, 0.5, 100))
        if self._chance.random() < 0.3:
            schema["multipleOf"] = self._chance.choice((0.25, 0.5, 1, 3))
        return schema

    def _integer(self, depth: int) -> dict[str, Any]:
        low = self._chance.choice((0, -7, 5, 2**31, -(2**53)))
        high = low + self._chance.choice((1, 10, 12345, 2**40))
        schema: dict[str, Any] = {"type": "integer", "minimum": low, "exclusiveMaximum": high}
        if self._chance.random() < 0.3:
            schema["multipleOf"] = self._chance.choice((2, 7, 10))
        return schema

    def _constant(self, depth: int) -> dict[str, Any]:
        values: list[Any] = [None, True, 0, -5, 2.5, "a", 'b"\\\n', [1, "x"], {"k": None, "j": [False]}, "ж😀", ""]
        if self._chance.random() < 0.4:
            return {"const": self._chance.choice(values)}
        return {"enum": self._chance.sample(values, self._chance.randint(1, 4))}

    def _object(self, depth: int) -> dict[str, Any]:
        names = self._some(NAMES, 3)
        schema: dict[str, Any] = {"type": "object", "properties": {name: self._schema(depth) for name in names}}
        schema["required"] = [name for name in names if self._chance.random() < 0.6]
        if self._chance.random() < 0.7:
            schema["additionalProperties"] = self._chance.choice((False, False, self._plain(0)))
        return schema

    def _map(self, depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "object", "additionalProperties": self._plain(0)}
        kind = self._chance.randint(0, 3)
        if kind == 0:
            schema["patternProperties"] = {"^x": self._schema(depth)}
        elif kind == 1:
            schema |= {"minProperties": self._chance.randint(0, 1), "maxProperties": self._chance.randint(1, 3)}
        elif kind == 2:
            schema["propertyNames"] = {"pattern": "^[a-c]+$"}
        return schema

    def _array(self, depth: int) -> dict[str, Any]:
        low = self._chance.randint(0, 2)
        schema: dict[str, Any] = {"type": "array", "items": self._schema(depth), "maxItems": low + 2, "minItems": low}
        if self._chance.random() < 0.3:
            schema["prefixItems"] = [self._schema(depth), self._schema(0)]
        return schema

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self._schema(depth) for _ in range(self._chance.randint(1, 3))]}

    def _one_of(self, depth: int) -> dict[str, Any]:
        tags = self._chance.sample(("x", "y", "z"), 2)
        return {"oneOf": [self._tagged(tag, depth) for tag in tags], "discriminator": {"propertyName": "kind"}}

    def _tagged(self, tag: str, depth: int) -> dict[str, Any]:
        inner = {"kind": {"const": tag}, "value": self._schema(depth)}
        return {"type": "object", "properties": inner, "required": ["kind"], "additionalProperties": False}

    def _all_of(self, depth: int) -> dict[str, Any]:
        parts = [
            {"type": "object", "properties": {n: self._schema(depth)}, "required": [n]} for n in self._some(NAMES, 2)
        ]
        return {"allOf": [*parts, self._object(0)]}

    def _reference(self, depth: int) -> dict[str, Any]:
        name = self._chance.choice(list(self._definitions))
        pointer = name.replace("~", "~0").replace("/", "~1").replace("%", "%25").replace(" ", "%20")
        return {"$ref": f"#/$defs/{pointer}"}
