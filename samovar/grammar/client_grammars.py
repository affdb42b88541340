"""Grammars that clients write themselves: Lark as llguidance takes it, and EBNF (GBNF) as llama.cpp and xgrammar do."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from samovar.errors import ValidationError

_LARK_START = re.compile(r"^\s*(?:%llguidance\b|start\s*(?:\[[^\]\n]*\])?\s*:(?!:=))", re.MULTILINE)
_LEXEME = re.compile(
    r"""
      "(?:\\.|[^"\\\n])*"            # a literal
    | /(?!/)(?:\\.|[^/\\\n])+/       # a regex
    | (?://|\#)[^\n]*                # a comment
    | %json\b
    | %llguidance\b
    | \[[^\]\n]*\]                   # attributes of a rule
    """,
    re.VERBOSE,
)
_BACKTRACKING = re.compile(r"\b(stop|max_tokens|temperature|stop_capture)\b")
_DECODER = json.JSONDecoder()


def is_lark(grammar: str) -> bool:
    """Whether a client's grammar is Lark; otherwise it is EBNF, whose rules are written with `::=`."""
    return _LARK_START.search(grammar) is not None


def checked_lark(grammar: str, schema: Callable[[Any], Mapping[str, Any]], field: str) -> str:
    """A client's Lark with every inline JSON Schema made enforceable. Raises `ValidationError` for rule attributes that
    need tokens to be taken back, and for options."""
    written, at = [], 0
    while (found := _LEXEME.search(grammar, at)) is not None:
        text = found[0]
        written.append(grammar[at : found.end()])
        at = found.end()
        if text in ("%json", "%llguidance"):
            value, at = _object(grammar, at, text, field)
            if text == "%llguidance" and value:
                raise ValidationError(f"{field}: options of %llguidance are not taken", parameter=field, value=value)
            written.append(" " + json.dumps(schema(value) if text == "%json" else {}))
        elif text.startswith("[") and (word := _BACKTRACKING.search(text)) is not None:
            message = f"{field}: the rule attribute {word[1]!r} is not available here"
            raise ValidationError(message, parameter=field, value=text[:200])
    return "".join(written) + grammar[at:]


def _object(grammar: str, at: int, word: str, field: str) -> tuple[Any, int]:
    start = at + len(grammar[at:]) - len(grammar[at:].lstrip())
    try:
        return _DECODER.raw_decode(grammar, start)
    except (ValueError, RecursionError) as error:
        raise ValidationError(f"{field}: what follows {word} is not JSON: {error}", parameter=field) from error
