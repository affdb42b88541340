"""PythonText: the arguments of a call written as Python literals, read in pieces of any size, given out as JSON.

Only literals: strings, numbers, True, False, None (JSON's spellings too), lists, tuples and dicts with string keys. Nothing
is evaluated.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable

from samovar.text.formats.json_text import MAX_DEPTH

_blanks = re.compile(r"[ \t\r\n]*")
_plain = re.compile(r"[^'\"\\]+")
_word_chars = re.compile(r"[\w.-]*")
_json_number_chars = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_number_chars = re.compile(r"[0-9A-Za-z_.]*")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "/": "/", "\n": ""}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_TOKEN_CHARS = 300
"""Of a number, a word or the name of an argument."""


class PythonText:
    """Reads keyword arguments from the opening parenthesis to the closing one. `out` collects the JSON object."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.pending: list[str] = []
        """Read, but not yet in `out`, as it was."""
        self.is_done = False
        self.is_failed = False
        self._closers: list[str] = []
        self._state: Callable[[str, int], int] = self._opening
        self._may_close = False
        self._has_comma = False
        self._token = ""
        self._quote = ""
        self._is_key = False

    @property
    def in_quotes(self) -> bool:
        """Whether the next character belongs to a string."""
        return self._state in (self._string, self._escape)

    def feed(self, text: str, at: int = 0) -> int:
        """Read from `at`; returns where it stopped: at the end of the text, after the arguments, or at what is wrong."""
        while at < len(text) and not (self.is_done or self.is_failed):
            at = self._state(text, at)
        return at

    def take(self) -> str:
        """The JSON text since the last call."""
        text = "".join(self.out)
        self.out.clear()
        return text

    def _fail(self, at: int) -> int:
        self.is_failed = True
        return at

    def _write(self, text: str) -> None:
        self.pending.clear()
        self.out.append(", " + text if self._has_comma else text)
        self._has_comma = False

    def _skip_blanks(self, text: str, at: int) -> int:
        found = _blanks.match(text, at)
        end = at if found is None else found.end()
        if end > at:
            self.pending.append(text[at:end])
        return end

    # --- states: each reads some text and returns where it stopped

    def _opening(self, text: str, at: int) -> int:
        self._closers.append(")")
        self._state, self._may_close = self._argument, True
        self.out.append("{")
        return at + 1

    def _argument(self, text: str, at: int) -> int:
        """A key of the call, or its end."""
        at = self._skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == ")":
            return self._close(at)
        self._state = self._argument_name
        return at if text[at].isidentifier() else self._fail(at)

    def _argument_name(self, text: str, at: int) -> int:
        end = self._read_token(text, at)
        if end < len(text):
            self._state = self._equals
        return end

    def _equals(self, text: str, at: int) -> int:
        at = self._skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != "=":
            return self._fail(at)
        self._write(json.dumps(self._token, ensure_ascii=False) + ": ")
        self._token = ""
        self._state, self._may_close = self._value, False
        return at + 1

    def _read_token(self, text: str, at: int, chars: re.Pattern[str] = _word_chars) -> int:
        found = chars.match(text, at, at + MAX_TOKEN_CHARS + 1 - len(self._token))
        end = at if found is None else found.end()
        self._token += text[at:end]
        self.pending.append(text[at:end])
        self.is_failed = len(self._token) > MAX_TOKEN_CHARS
        return end

    def _value(self, text: str, at: int) -> int:
        at = self._skip_blanks(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char in "'\"":
            self._start_string(char, is_key=False)
        elif char in "([{":
            if len(self._closers) == MAX_DEPTH:
                return self._fail(at)
            self._write("{" if char == "{" else "[")
            self._closers.append(_CLOSERS[char])
            self._state, self._may_close = (self._key if char == "{" else self._value), True
        elif self._may_close and char == self._closers[-1]:
            return self._close(at)
        elif char in "+-.0123456789":
            self._state = self._number
            self._token = char
            self.pending.append(char)
        elif char.isalpha():
            self._state = self._word
            return at
        else:
            return self._fail(at)
        return at + 1

    def _key(self, text: str, at: int) -> int:
        at = self._skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] in "'\"":
            self._start_string(text[at], is_key=True)
            return at + 1
        return self._close(at) if text[at] == "}" and self._may_close else self._fail(at)

    def _colon(self, text: str, at: int) -> int:
        at = self._skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._write(": ")
        self._state, self._may_close = self._value, False
        return at + 1

    def _after(self, text: str, at: int) -> int:
        at = self._skip_blanks(text, at)
        if at == len(text):
            return at
        closer = self._closers[-1]
        if text[at] == ",":
            self.pending.append(",")
            self._has_comma = self._may_close = True
            self._state = {")": self._argument, "}": self._key}.get(closer, self._value)
            if closer == ")" and len(self._closers) > 1:
                self._state = self._value
            return at + 1
        return self._close(at) if text[at] == closer else self._fail(at)

    def _close(self, at: int) -> int:
        closer = self._closers.pop()
        self._has_comma = False
        self._write("}" if closer == "}" or not self._closers else "]")
        self._state = self._after
        self.is_done = not self._closers
        return at + 1

    def _word(self, text: str, at: int) -> int:
        end = self._read_token(text, at)
        return end if self.is_failed or end == len(text) else self._end_token(end, _WORDS.get(self._token))

    def _number(self, text: str, at: int) -> int:
        end = self._read_token(text, at, _number_chars)
        if self.is_failed or end == len(text):
            return end
        if text[end] in "+-" and self._token[-1] in "eE":
            self._token += text[end]
            self.pending.append(text[end])
            return end + 1
        return self._end_token(end, _json_number(self._token))

    def _end_token(self, at: int, value: str | None) -> int:
        if value is None:
            return self._fail(at)
        self._write(value)
        self._token = ""
        self._state = self._after
        return at

    # --- strings

    def _start_string(self, quote: str, *, is_key: bool) -> None:
        self._write('"')
        self._quote, self._is_key = quote, is_key
        self._state = self._string

    def _say(self, text: str) -> None:
        self.out.append(json.dumps(text, ensure_ascii=False)[1:-1])

    def _string(self, text: str, at: int) -> int:
        char = text[at]
        if char == self._quote:
            self.out.append('"')
            self._state = self._colon if self._is_key else self._after
            return at + 1
        if char == "\\":
            self.pending.append(char)
            self._state = self._escape
            return at + 1
        run = _plain.match(text, at)
        self._say(char if run is None else run[0])
        return at + 1 if run is None else run.end()

    def _escape(self, text: str, at: int) -> int:
        self._token += text[at]
        self.pending.append(text[at])
        num_digits = _HEX_DIGITS.get(self._token[0], 0)
        if len(self._token) - 1 < num_digits:
            return at + 1
        self.pending.clear()
        self._say(_unescaped(self._token, num_digits))
        self._token = ""
        self._state = self._string
        return at + 1


def _unescaped(written: str, num_digits: int) -> str:
    """What stands for the backslash and this; itself, if it is no escape."""
    if not num_digits:
        return written if written in "'\"\\" else _ESCAPES.get(written, "\\" + written)
    try:
        code = int(written[1:], 16)
    except ValueError:
        return "\\" + written
    return "\ufffd" if 0xD800 <= code < 0xE000 or code > 0x10FFFF else chr(code)


def _json_number(text: str) -> str | None:
    """A Python number as JSON; None if it is none that JSON has. What JSON writes alike stays as it is, whatever its size."""
    if _json_number_chars.fullmatch(text):
        return text
    try:
        return str(int(text, 0))
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        return None
    return json.dumps(number) if math.isfinite(number) and text.strip("+-")[:1] in ".0123456789" else None
