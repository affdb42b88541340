"""Lark: writes grammars for llguidance out of expressions; literals with special tokens become those tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

SpecialTokens: TypeAlias = Callable[[str], int | None]
"""The id of the special token that is written exactly so; None for every other text."""

SchemaSource: TypeAlias = Callable[[Mapping[str, Any] | bool | None], Mapping[str, Any]]
"""A client's JSON Schema (None: any object) -> the schema that is enforced; refuses what cannot be."""

LONGEST_SPECIAL = 64
"""Characters; longer texts are never looked up as special tokens."""

ANY_TEXT = "/(?s:.*)/"
_NAME = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class _Shape:
    """How an expression was made, for the ones whose beginning may have to be taken off."""

    kind: Literal["text", "seq", "any", "many"]
    parts: tuple[str | int, ...] = ()
    least: int = 0
    most: int | None = None
    separator: str | None = None


def any_json(schema: Mapping[str, Any] | bool | None) -> Mapping[str, Any]:
    """The schema as it is, written without blanks: what a `Lark` without a compiler behind it enforces."""
    if schema is None:
        schema = {"type": "object"}
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    return {**schema, "x-guidance": {"whitespace_flexible": False}}


class Lark:
    """Makes expressions of llguidance's Lark dialect, and the document around them.

    Every method returns an expression: text that may stand anywhere in a rule. Lexemes match as much text as they can
    and never give any back, so a `regex` must not be able to swallow what follows it.
    """

    def __init__(self, special: SpecialTokens, *, schema_source: SchemaSource = any_json) -> None:
        self._special = special
        self._schema_source = schema_source
        self._rules: dict[str, str] = {}
        self._attributes: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._shapes: dict[str, _Shape] = {}

    def text(self, literal: str) -> str:
        """Exactly this text. Special tokens written in it match by id, and only by id."""
        parts: list[str | int] = []
        start = at = 0
        while at < len(literal):
            token, length = self._special_at(literal, at)
            if token is None:
                at += 1
                continue
            if start < at:
                parts.append(literal[start:at])
            parts.append(token)
            start = at = at + length
        if start < len(literal) or not parts:
            parts.append(literal[start:])
        return self._text_of(parts)

    def plain(self, literal: str) -> str:
        """Exactly this text, spelled with ordinary tokens also where it looks like a special token."""
        return self._text_of([literal])

    def json(self, schema: Mapping[str, Any] | bool | None) -> str:
        """A JSON value that satisfies the schema; None is any JSON object."""
        return "%json " + json.dumps(self._schema_source(schema), ensure_ascii=True)

    def until(self, marker: str) -> str:
        """Any text up to and including the first `marker`."""
        if not marker:
            raise ValueError("Lark.until: the marker is empty")
        if self._special(marker) is not None:
            return self.seq(ANY_TEXT, self.text(marker))
        return self._lazy(f"{ANY_TEXT} {_quoted(marker)}")

    def matching_until(self, patterns: Sequence[str], end: str, *, without: str) -> str:
        """Text that every pattern matches whole and that does not hold `without`, spelled out; and then `end`."""
        wanted = [f"/(?s:{self.regex(pattern)[1:-1]})/" for pattern in patterns if pattern]
        body = " & ".join([ANY_TEXT, *wanted, f"~({ANY_TEXT} {_quoted(without)} {ANY_TEXT})"])
        first, *others = self._shapes[self.text(end)].parts
        if isinstance(first, int):
            return self.seq(self._terminal(body), self.text(end))
        terminal = self._terminal(f"({body}) {_quoted(first)}")
        return self.seq(terminal, self._text_of(others)) if others else terminal

    def regex(self, pattern: str) -> str:
        """Text that the whole pattern matches, in the syntax of Rust's regex crate."""
        if not pattern:
            return '""'
        escaped = re.sub(r"\\.|/|\n", _regex_escape, pattern, flags=re.DOTALL)
        return f"/{escaped}/"

    def seq(self, *expressions: str) -> str:
        """One after the other."""
        kept = [e for e in expressions if e != '""']
        if not kept:
            return '""'
        if len(kept) == 1:
            return kept[0]
        return self._made(" ".join(kept), _Shape("seq", tuple(kept)))

    def any_of(self, *expressions: str) -> str:
        """One of them."""
        distinct = list(dict.fromkeys(expressions))
        if not distinct:
            raise ValueError("Lark.any_of: no expression given")
        if len(distinct) == 1:
            return distinct[0]
        return self._made("(" + " | ".join(distinct) + ")", _Shape("any", tuple(distinct)))

    def optional(self, expression: str) -> str:
        """The expression or nothing."""
        return f"({expression})?"

    def many(self, expression: str, *, least: int = 0, most: int | None = None, separator: str | None = None) -> str:
        """The expression `least` to `most` times (None: without end), with `separator` between two of them."""
        if least < 0 or (most is not None and most < least):
            raise ValueError(f"Lark.many: {least} to {most} times")
        if most == 0:
            return '""'
        if separator is not None:
            rest = self.many(self.seq(separator, expression), least=max(0, least - 1), most=most and most - 1)
            first = self.seq(expression, rest)
            result = first if least else self.optional(first)
        else:
            result = f"({expression}){_count(least, most)}"
        return self._made(result, _Shape("many", (expression,), least, most, separator))

    def rule(self, name: str, expression: str) -> str:
        """Names an expression, so that it stands in the document once. Returns the name, made unique."""
        base = _NAME.sub("_", name.lower()).strip("_") or "rule"
        if not base[0].isalpha():
            base = "r_" + base
        if base == "start":
            base = "start_1"
        unique, number = base, 2
        while unique in self._rules:
            unique, number = f"{base}_{number}", number + 1
        self._rules[unique] = expression
        return unique

    def free_until_any(self, markers: Sequence[str]) -> str:
        """Any text up to and including the first of `markers`."""
        return self.any_of(*(self.until(marker) for marker in markers))

    def free_then(self, markers: Sequence[str], region: str, *, only_at_start: bool = False) -> str:
        """Any text without one of `markers`, and from the first of them on the text of `region`; `region` may not come.

        Every text of `region` begins with one of `markers`, with `Lark.text` of it. `only_at_start`: they count only
        after nothing but blanks, and the region then begins the answer.
        """
        specials = [marker for marker in markers if isinstance(self._shapes[self.text(marker)].parts[0], int)]
        tails = {m: self._after(region, m) for m in markers if m not in specials}
        halves = {m: str(parts[0]) for m in tails if len(parts := self._shapes[self.text(m)].parts) > 1}
        if halves:  # a marker of ordinary text and a special token: the text alone is content
            return self._free_then_halves(halves, region)
        if not specials and all(tail is None for tail in tails.values()):
            raise ValueError(f"Lark.free_then: the region does not begin with one of {list(markers)}")
        if only_at_start:
            blanks = r"/[ \t\r\n]*/"
            said = [f"({blanks} {_quoted(m)} {ANY_TEXT})" for m in tails]
            content = self._terminal(" & ".join([ANY_TEXT, *(f"~{s}" for s in said)])) if said else ANY_TEXT
            return self.any_of(region, content)
        forbidden = [f"~({ANY_TEXT} {_quoted(m)} {ANY_TEXT})" for m, tail in tails.items() if tail is None]
        free = self._terminal(" & ".join([ANY_TEXT, *forbidden])) if forbidden else self._terminal(ANY_TEXT)
        options = [
            self.seq(self._lazy(f"{free} {_quoted(marker)}"), tail)
            for marker, tail in tails.items()
            if tail is not None
        ]
        if specials:
            options.append(self.seq(free, region))
        return self.any_of(*options, free)

    def _free_then_halves(self, halves: Mapping[str, str], region: str) -> str:
        free = self._terminal(ANY_TEXT)
        before = [
            (self._terminal(f"{ANY_TEXT} {_quoted(half)}"), self._after(region, half)) for half in halves.values()
        ]
        return self.any_of(*(self.seq(said, tail) for said, tail in before if tail is not None), free)

    def document(self, start: str) -> str:
        """The whole grammar, beginning at `start`."""
        lines = ["%llguidance {}", f"start: {start}"]
        lines += [f"{name}{self._attributes.get(name, '')}: {body}" for name, body in self._rules.items()]
        lines += [f"{name}: {body}" for body, name in self._terminals.items()]
        return "\n".join(lines) + "\n"

    def _special_at(self, literal: str, at: int) -> tuple[int | None, int]:
        for length in range(min(LONGEST_SPECIAL, len(literal) - at), 0, -1):
            token = self._special(literal[at : at + length])
            if token is not None:
                return token, length
        return None, 0

    def _text_of(self, parts: Sequence[str | int]) -> str:
        written = [_quoted(part) if isinstance(part, str) else f"<[{part}]>" for part in parts]
        return self._made(" ".join(written), _Shape("text", tuple(parts)))

    def _made(self, expression: str, shape: _Shape) -> str:
        self._shapes.setdefault(expression, shape)
        return expression

    def _lazy(self, body: str) -> str:
        known = next((n for n, b in self._rules.items() if b == body and n in self._attributes), None)
        if known is None:
            known = self.rule("until", body)
            self._attributes[known] = "[lazy]"
        return known

    def _terminal(self, body: str) -> str:
        return self._terminals.setdefault(body, f"TEXT_{len(self._terminals) + 1}")

    def _after(self, expression: str, marker: str) -> str | None:
        """What may follow `marker` where the expression begins with it; None where it never does."""
        if expression in self._rules:
            return self._after(self._rules[expression], marker)
        shape = self._shapes.get(expression)
        if shape is None:
            return None
        first = shape.parts[0]
        if shape.kind == "text":
            if not isinstance(first, str) or not first.startswith(marker):
                return None
            return self._text_of([first[len(marker) :], *shape.parts[1:]])
        if shape.kind == "any":
            tails = [self._after(str(part), marker) for part in shape.parts]
            kept = [tail for tail in tails if tail is not None]
            return self.any_of(*kept) if kept else None
        tail = self._after(str(first), marker)
        if tail is None:
            return None
        if shape.kind == "seq":
            return self.seq(tail, *(str(part) for part in shape.parts[1:]))
        again = str(first) if shape.separator is None else self.seq(shape.separator, str(first))
        most = None if shape.most is None else shape.most - 1
        return self.seq(tail, self.many(again, least=max(0, shape.least - 1), most=most))


def _quoted(literal: str) -> str:
    return json.dumps(literal, ensure_ascii=True).replace("\x7f", "\\u007f")


def _count(least: int, most: int | None) -> str:
    if most is None:
        return "*" if least == 0 else "+" if least == 1 else f"{{{least},}}"
    if (least, most) == (0, 1):
        return "?"
    return f"{{{least}}}" if least == most else f"{{{least},{most}}}"


def _regex_escape(found: re.Match[str]) -> str:
    return {"/": "\\/", "\n": "\\n", "\\\n": "\\n"}.get(found[0], found[0])
