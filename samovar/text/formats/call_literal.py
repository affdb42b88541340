"""Reads calls written as `call:name{key:value}`: bare keys, strings between quote tokens, objects and lists within."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

from samovar.text.formats.argument_values import ANY, STRING, ArgumentValue, ParameterKinds, quoted
from samovar.text.formats.base import Arguments, CallEnd, CallStart, Failed, Piece, Tools

HEAD = "call:"
LONGEST_NAME = 256
"""Characters of a function's or parameter's name, with blanks and quotes around it."""

_NON_BLANK = re.compile(r"\S")
_NO_NAME = re.compile(r"[\s<>\"'{}()\[\],:]")
_SCALAR_END = re.compile(r"[,}\]]")
_ESCAPE_OR_QUOTE = re.compile(r'\\.|"', re.DOTALL)
_CLOSER = {"{": "}", "[": "]"}


class CallLiteralReader:
    """One region, of calls one after the other. `quote` opens and closes a string and cannot stand in one."""

    def __init__(self, quote: str, tools: Tools) -> None:
        self._quote = quote
        self._tools = tools
        self._text = ""
        self._at = 0
        self._held: list[str] = []
        self._out: list[Piece] = []
        self._state: Callable[[], bool] = self._before_name
        self._is_first = True
        self._closers: list[str] = []
        self._is_empty = True
        self._kinds = ParameterKinds(None)
        self._key = ""
        self._value = ArgumentValue(STRING)

    @property
    def in_quotes(self) -> bool:
        """Within a string, which may hold any text but its quote."""
        return self._state == self._in_string

    def feed(self, text: str) -> Iterator[Piece]:
        """The next text of the region."""
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._state():
            pass
        return self._given_out()

    def close(self, *, is_complete: bool) -> Iterator[Piece]:
        """The end of the region. A call that was begun lacks its last brace: it stays unfinished."""
        rest = self._text[self._at :]
        if (self._state == self._before_name and (self._is_first or rest)) or self._state == self._in_name:
            self._fail(is_over=True)
        self._state = self._over
        return self._given_out()

    def _given_out(self) -> Iterator[Piece]:
        out, self._out = self._out, []
        return iter(out)

    def _give(self, text: str) -> None:
        if text:
            self._out.append(Arguments(text))

    def _fail(self, *, is_over: bool = False) -> bool:
        if self._state != self._over:
            held, rest = "".join(self._held), self._text[self._at :]
            self._out.append(Failed(held + rest) if is_over else Failed(held, rest))
        return self._go(self._over)

    def _over(self) -> bool:
        self._text, self._at = "", 0
        return False

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _char(self) -> str:
        """The next character that is no blank, which stays; "" if there is none yet."""
        found = _NON_BLANK.search(self._text, self._at)
        self._at = found.start() if found else len(self._text)
        return found[0] if found else ""

    def _at_quote(self) -> bool | None:
        """Whether the quote stands here; None: that cannot be said yet."""
        if self._text.startswith(self._quote, self._at):
            return True
        return None if self._quote.startswith(self._text[self._at : self._at + len(self._quote)]) else False

    # --- a call's head

    def _before_name(self) -> bool:
        start = self._at
        char = self._char()
        self._held.append(self._text[start : self._at])
        if self._text.startswith(HEAD, self._at):
            self._held.append(HEAD)
            self._at += len(HEAD)
            return self._go(self._in_name)
        is_hopeful = not char or HEAD.startswith(self._text[self._at : self._at + len(HEAD)])
        return False if is_hopeful else self._fail()

    def _in_name(self) -> bool:
        end = self._text.find("{", self._at)
        if end < 0 or end - self._at > LONGEST_NAME:
            return self._fail() if len(self._text) - self._at > LONGEST_NAME else False
        name = self._text[self._at : end].strip()
        if not name or _NO_NAME.search(name) or (self._tools and name not in self._tools):
            return self._fail()
        self._out.append(CallStart(name))
        self._kinds = ParameterKinds(self._tools.get(name))
        self._held.clear()
        self._at = end + 1
        self._is_first = False
        self._closers, self._is_empty = ["}"], True
        return self._go(self._in_container)

    # --- values

    def _in_container(self) -> bool:
        """Before a key, before an item of a list, or before the end."""
        char = self._char()
        if char in ("}", "]"):
            return self._close_container(char)
        if not char:
            return False
        return self._go(self._in_key if self._closers[-1] == "}" else self._before_value)

    def _close_container(self, char: str) -> bool:
        if char != self._closers[-1]:
            return self._fail()
        self._at += 1
        self._closers.pop()
        if not self._closers:
            self._give("{}" if self._is_empty else "}")
            self._out.append(CallEnd())
            return self._go(self._before_name)
        self._give(char)
        self._is_empty = False
        return self._go(self._after_value)

    def _separator(self) -> str:
        """What stands before the next key or item. The first brace comes with the first key, never alone."""
        if not self._is_empty:
            return ", "
        return "{" if len(self._closers) == 1 else ""

    def _in_key(self) -> bool:
        quote = self._at_quote()
        if quote is None:
            return False
        skipped = len(self._quote) if quote else 0
        stop = self._text.find(self._quote if quote else ":", self._at + skipped)
        end = self._text.find(":", stop) if stop >= 0 else -1
        if end < 0 or end - self._at > LONGEST_NAME:
            return self._fail() if len(self._text) - self._at > LONGEST_NAME else False
        self._key = self._text[self._at + skipped : stop].strip()
        self._give(self._separator() + quoted(self._key) + ": ")
        self._at = end + 1
        return self._go(self._before_value)

    def _before_value(self) -> bool:
        char, quote = self._char(), self._at_quote()
        if not char or quote is None:
            return False
        if self._closers[-1] == "]":
            self._give(self._separator())
        if char in _CLOSER:
            self._at += 1
            self._closers.append(_CLOSER[char])
            self._is_empty = True
            self._give(char)
            return self._go(self._in_container)
        self._is_empty = False
        kinds = self._kinds.of(self._key) if len(self._closers) == 1 else ANY
        if quote:
            self._at += len(self._quote)
            self._value = ArgumentValue(STRING if "string" in kinds else kinds)
            self._give(self._value.begin())
            return self._go(self._in_string)
        self._value = ArgumentValue(kinds if kinds == STRING else ANY - STRING)
        self._at += char == '"'
        return self._go(self._in_plain_string if char == '"' else self._in_scalar)

    def _in_string(self) -> bool:
        end = self._text.find(self._quote, self._at)
        if end >= 0:
            self._give(self._value.feed(self._text[self._at : end]) + self._value.end())
            self._at = end + len(self._quote)
            return self._go(self._after_value)
        half = self._text.rfind(self._quote[0], max(self._at, len(self._text) - len(self._quote) + 1))
        stop = half if half >= 0 and self._quote.startswith(self._text[half:]) else len(self._text)
        self._give(self._value.feed(self._text[self._at : stop]))
        self._at = stop
        return False

    def _in_plain_string(self) -> bool:
        """A string as JSON writes it, which no template teaches but models write."""
        safe = self._at
        for found in _ESCAPE_OR_QUOTE.finditer(self._text, self._at):
            if found[0] == '"':
                self._held.append(self._text[self._at : found.start()])
                self._at = found.end()
                return self._end_held(quoted(_unescaped("".join(self._held))))
            safe = found.end()
        stop = len(self._text) - (self._text.endswith("\\") and safe < len(self._text))
        self._held.append(self._text[self._at : stop])
        self._at = stop
        return False

    def _in_scalar(self) -> bool:
        """A number, a word, or text without quotes."""
        found = _SCALAR_END.search(self._text, self._at)
        stop = found.start() if found else len(self._text)
        self._held.append(self._text[self._at : stop])
        self._at = stop
        if not found:
            return False
        text = "".join(self._held).strip()
        return self._end_held(self._value.begin() + self._value.feed(text) + self._value.end())

    def _end_held(self, written: str) -> bool:
        self._held.clear()
        self._give(written)
        return self._go(self._after_value)

    def _after_value(self) -> bool:
        char = self._char()
        if char == ",":
            self._at += 1
            return self._go(self._in_container)
        if char in ("}", "]"):
            return self._close_container(char)
        return self._fail() if char else False


def _unescaped(text: str) -> str:
    """What is between the quotes of a JSON string; as it stands, if that is none."""
    try:
        return str(json.loads(f'"{text}"', strict=False))
    except ValueError:
        return text
