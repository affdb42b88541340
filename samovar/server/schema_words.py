"""in_words: a field's JSON schema as people say it: `integer, 0 to 9`."""

from __future__ import annotations

import re
from typing import Any

REFERENCE = re.compile(r"#/components/schemas/([\w.-]+)")
"""A reference to a named object; group 1 is its name."""
HUGE = 2**63 - 1
"""A bound of a 64-bit integer, which is no bound to a reader."""


def in_words(schema: dict[str, Any]) -> str:
    """One line. That null means absent is said once for all fields, not here."""
    if "anyOf" in schema:
        return " or ".join(in_words(kind) for kind in schema["anyOf"] if kind.get("type") != "null")
    if "$ref" in schema:
        return REFERENCE.sub(r"\1", schema["$ref"])
    if "enum" in schema:
        return "one of " + ", ".join(f'"{value}"' if isinstance(value, str) else str(value) for value in schema["enum"])
    kind = schema.get("type", "anything")
    if kind == "array":
        return _with_limits("list of " + _several(in_words(schema.get("items", {}))), _span(schema, "Items", "entries"))
    if kind == "string":
        pattern = schema.get("pattern")
        limits = _span(schema, "Length", "characters")
        return _with_limits("string", ", ".join(filter(None, [limits, pattern and f"matching {pattern}"])))
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_several(in_words(schema['additionalProperties']))}"
    return _with_limits(str(kind), _range(schema))


def _several(kind: str) -> str:
    """`string` -> `strings`; what is longer is put in parentheses."""
    return f"{kind}s" if kind.isalnum() and kind != "anything" else f"({kind})"


def _with_limits(text: str, limits: str) -> str:
    return f"{text}, {limits}" if limits else text


def _span(schema: dict[str, Any], what: str, unit: str) -> str:
    low, high = schema.get(f"min{what}", 0), schema.get(f"max{what}")
    if high is not None:
        return f"{low} to {high} {unit}"
    return "" if not low else "not empty" if low == 1 else f"at least {low} {unit}"


def _range(schema: dict[str, Any]) -> str:
    low, above, high = schema.get("minimum"), schema.get("exclusiveMinimum"), schema.get("maximum")
    low = None if low == -HUGE - 1 else low
    high = None if high == HUGE else high
    if low is not None and high is not None:
        return f"{low} to {high}"
    begin = f"at least {low}" if low is not None else f"above {above}" if above is not None else ""
    end = f"at most {high}" if high is not None else ""
    return ", ".join(filter(None, [begin, end]))
