"""Schemas by chance out of the forms that xgrammar may follow."""

from __future__ import annotations

import random
from typing import Any

from tests.grammar.random_schemas import NAMES

CONSTANTS: tuple[Any, ...] = (None, True, False, 0, -5, 120, "a", "ab", 'b"\\\n', "ж😀", "", "12", "\x08\x0c\r\t/")
SCALARS = ("null", "boolean", "integer", "number", "string")


def plain_schema(chance: random.Random, depth: int = 3) -> dict[str, Any]:
    """One schema that is inside the gate."""
    kinds = ["type", "types", "enum", "const"] + ["object", "object", "array", "any"] * (depth > 0)
    kind = chance.choice(kinds)
    if kind == "type":
        return {"type": chance.choice(SCALARS), "title": "pattern"}
    if kind == "types":
        return {"type": chance.sample(SCALARS, chance.randint(1, 3))}
    if kind == "const":
        return {"const": chance.choice(CONSTANTS)}
    if kind == "enum":
        return {"enum": chance.sample(CONSTANTS, chance.randint(1, 5))}
    if kind == "array":
        return _array(chance, depth - 1)
    if kind == "any":
        options = [plain_schema(chance, 0) for _ in range(chance.randint(0, 2))]
        options += [_object(chance, depth - 1) for _ in range(chance.randint(0, 3))]
        return {"anyOf": options or [_array(chance, depth - 1)]}
    return _object(chance, depth - 1)


def _object(chance: random.Random, depth: int) -> dict[str, Any]:
    names = chance.sample(NAMES, chance.randint(0, 5))
    required = [name for name in names if chance.random() < 0.5]
    chance.shuffle(required)
    properties = {name: plain_schema(chance, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(chance: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": chance.choice(("array", ["array", "null"])), "items": plain_schema(chance, depth)}
    if chance.random() < 0.7:
        schema["minItems"] = chance.randint(0, 3)
    if chance.random() < 0.7:
        schema["maxItems"] = schema.get("minItems", 0) + chance.randint(0, 3)
    return schema
