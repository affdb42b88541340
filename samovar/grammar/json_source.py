"""JSON Schemas as clients send them (objects, text, booleans) -> the schema and options llguidance gets."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from samovar.errors import ValidationError
from samovar.grammar.limits import GrammarLimits
from samovar.grammar.regex_rules import translate
from samovar.grammar.schema_rewrite import SchemaRewriter

WHITESPACE = r" |\n[ \t]{0,20}"
"""What may stand between two JSON tokens, once: a blank, or a line end and an indent. It cannot go on for ever."""

LONGEST_BLANK = 20
"""What an unlimited repetition in a client's whitespace pattern is limited to."""

LONGEST_INTEGER = 1000
"""Bits of a number anywhere in a schema; floats end soon after."""

ESCAPES = 'nrbtf\\"'
"""The escapes of JSON strings: only where JSON needs one, so that each string is spelled in one way, in UTF-8. With
`\\u0061` for `a`, a name could get around what the schema says about it."""

_BLANK_PATTERN = re.compile(r"(?: |\\[ntr]|[()\[\]|?*+{},\d\n\t\r])*")


@dataclass(frozen=True, slots=True, kw_only=True)
class JsonStyle:
    """How JSON is written: `whitespace` is the pattern between tokens (None: nothing may be there)."""

    whitespace: str | None = WHITESPACE
    is_closed: bool = False


def parse_schema(text: str, limits: GrammarLimits, *, field: str) -> Any:
    """A schema sent as text. Raises `ValidationError` for anything but JSON within the limits."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > limits.source_bytes:
        message = f"{field}: the schema has {size} bytes, more than the {limits.source_bytes} that are compiled"
        raise ValidationError(message, parameter=field, value=size)

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is no value of JSON")

    try:
        return json.loads(text, parse_constant=refuse)
    except RecursionError:
        raise ValidationError(f"{field}: nested deeper than {limits.depth} levels", parameter=field) from None
    except ValueError as error:
        raise ValidationError(f"{field} is not JSON: {error}", parameter=field, value=text[:200]) from error


def check_size(schema: Any, limits: GrammarLimits, *, field: str, more_depth: int = 0) -> None:
    """Raise `ValidationError` for a schema too deep, or with too many parts, to be worth compiling."""
    allowed = limits.depth + more_depth
    level, parts, size = [schema], 0, 0
    for _ in range(allowed + 1):
        below: list[Any] = []
        for part in level:
            if isinstance(part, Mapping):
                below += part.values()
                size += sum(len(key) for key in part if isinstance(key, str))
            elif isinstance(part, list):
                below += part
            elif isinstance(part, str):
                size += len(part)
            elif isinstance(part, int) and part.bit_length() > LONGEST_INTEGER:
                message = f"{field}: the schema holds an integer of {part.bit_length()} bits"
                raise ValidationError(message, parameter=field, value=part.bit_length())
        parts += len(level)
        if parts > limits.nodes or size > limits.source_bytes:
            message = f"{field}: the schema is larger than the {limits.source_bytes} bytes that are compiled"
            raise ValidationError(message, parameter=field, value=parts)
        level = below
        if not level:
            return
    raise ValidationError(f"{field}: nested deeper than {allowed} levels", parameter=field, value=allowed)


def enforced_schema(
    schema: Any, limits: GrammarLimits, style: JsonStyle, *, field: str, more_depth: int = 0
) -> dict[str, Any]:
    """The schema that llguidance enforces, with its options. Raises `ValidationError` naming keyword and place."""
    if isinstance(schema, str):
        schema = parse_schema(schema, limits, field=field)
    check_size(schema, limits, field=field, more_depth=more_depth)
    _check_names(schema, field)
    rewritten = SchemaRewriter(schema, limits, field=field, is_closed=style.is_closed).rewritten()
    options = {"whitespace_flexible": False, "json_allowed_escapes": ESCAPES}
    if style.whitespace is not None:
        options["whitespace_pattern"] = style.whitespace
    return {**rewritten, "x-guidance": options}


def client_whitespace(pattern: str, limits: GrammarLimits, *, field: str) -> str:
    """A client's pattern of what may stand between JSON tokens; only blanks, and only so many."""
    plain = pattern.replace(r"[\s]", r"\s").replace(r"\s", r"[ \t\n\r]")
    if _BLANK_PATTERN.fullmatch(plain) is None or re.search(r"\[[^\]]*\[", plain):
        message = f"{field} may only match blanks, tabs and line ends, got {pattern[:100]!r}"
        raise ValidationError(message, parameter=field, value=pattern[:200])
    written = translate(plain, field, is_whole=True, max_bytes=limits.pattern_bytes)
    bounded = re.sub(r"\{(\d+),\}", lambda m: f"{{{m[1]},{max(int(m[1]), LONGEST_BLANK)}}}", written)
    return bounded.replace("*", f"{{0,{LONGEST_BLANK}}}").replace("+", f"{{1,{LONGEST_BLANK}}}")


def _check_names(schema: Any, field: str) -> None:
    """JSON objects have names of text; a dict from Python may have others."""
    pending = [schema]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            wrong = next((key for key in part if not isinstance(key, str)), "")
            if not isinstance(wrong, str):
                raise ValidationError(f"{field}: {wrong!r} is no name of a JSON object", parameter=field, value=wrong)
            pending += part.values()
        elif isinstance(part, list):
            pending += part
