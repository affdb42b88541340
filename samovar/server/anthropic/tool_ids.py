"""Ids of tool calls: `toolu_` and the engine's own id, and back, so that a template sees what the model once wrote."""

from __future__ import annotations

import re

PREFIX = "toolu_"
_unsafe = re.compile(r"[^a-zA-Z0-9-]")
_escaped = re.compile(r"_([0-9a-f]{2,6})_")


def public_id(call_id: str) -> str:
    """The id a client sees: letters, digits, `-` and `_` only, whatever the model's format writes."""
    return PREFIX + _unsafe.sub(lambda match: f"_{ord(match[0]):02x}_", call_id)


def own_id(public: str) -> str:
    """What `public_id` was given; ids from elsewhere stay as they are."""
    if not public.startswith(PREFIX):
        return public
    inner = public[len(PREFIX) :]
    original = _escaped.sub(lambda match: chr(int(match[1], 16)) if int(match[1], 16) < 0x110000 else match[0], inner)
    return original if public_id(original) == public else public
