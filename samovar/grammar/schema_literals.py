"""Constants of a schema: which values can be written exactly so in an answer."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

NAMED_CONTROLS = frozenset("\b\t\n\f\r")
"""Control characters JSON has a short escape for. The others are not written: `\\u` escapes are not, either, so that
every string and every name has one spelling only."""


def check_text(value: Any) -> str | None:
    """Why a string cannot be written; None if it can."""
    if not isinstance(value, str):
        return f"must be a string, got {type(value).__name__}"
    for char in value:
        if (char < " " and char not in NAMED_CONTROLS) or char == "\x7f":
            return f"the character U+{ord(char):04X} cannot be written in an answer"
        if "\ud800" <= char <= "\udfff":
            return f"U+{ord(char):04X} is half a character"
    return None


def check_literal(value: Any) -> str | None:
    """Why a constant cannot be written or told from another one; None if it can."""
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, str):
        return check_text(value)
    if isinstance(value, int):
        if abs(value) >= 2**63 or int(float(value)) != value:
            return f"the constant {str(value)[:50]} is no integer that a 64-bit float can hold"
        return None
    if isinstance(value, float):
        if not math.isfinite(value):
            return f"the constant {value} is no number of JSON"
        if value and not 1e-9 <= abs(value) <= 1e15:
            return f"the constant {value} is outside of 1e-9 to 1e15, where numbers are compared exactly"
        return None
    if isinstance(value, list):
        return next((problem for item in value if (problem := check_literal(item))), None)
    if isinstance(value, Mapping):
        parts = [part for item in value.items() for part in item]
        return next((problem for part in parts if (problem := check_literal(part))), None)
    return f"{type(value).__name__} is no value of JSON"
