"""complete_members: what is whole of a JSON object that may have been cut off."""

from __future__ import annotations

import json
from typing import Any

import msgspec

_scan = json.JSONDecoder().raw_decode
_BLANKS = " \t\r\n"


def complete_members(text: str) -> dict[str, Any]:
    """The members of the object that `text` begins with, without the one in which it breaks off. Never raises."""
    try:
        whole = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError):
        return _members(text)
    return whole if isinstance(whole, dict) else {}


def _members(text: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    at = _skip(text, 0)
    if text[at : at + 1] != "{":
        return found
    try:
        while True:
            key, at = _scan(text, _skip(text, at + 1))
            at = _skip(text, at)
            if text[at : at + 1] != ":" or not isinstance(key, str):
                return found
            value, at = _scan(text, _skip(text, at + 1))
            at = _skip(text, at)
            # A number at the very end may be the beginning of a longer one.
            if text[at : at + 1] not in (",", "}"):
                return found
            found[key] = value
            if text[at] == "}":
                return found
    except (ValueError, RecursionError):
        return found


def _skip(text: str, at: int) -> int:
    while text[at : at + 1] and text[at] in _BLANKS:
        at += 1
    return at
