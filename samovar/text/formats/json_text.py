"""JsonText: one JSON value read in pieces of any size. Whatever comes, what it has given out begins a JSON value.

What models often get wrong is put right on the way, as soon as it is certain: raw line breaks in strings, escapes that
JSON does not have, halves of surrogate pairs, a comma before a closing bracket, and Python's True, False and None.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

MAX_DEPTH = 100
"""Levels of lists and objects; deeper ones make parsers recurse too far."""
MAX_NUMBER_CHARS = 300

_blanks = re.compile(r"[ \t\r\n]*")
_plain = re.compile(r'(?:[^"\\\x00-\x1f]++|\\["\\/bfnrt])++')
_hex = re.compile(r"[0-9a-fA-F]*")
_number_chars = re.compile(r"[0-9eE.+-]*")
_number = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_LITERALS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}
_CLOSERS = {"{": "}", "[": "]"}
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


class JsonText:
    """Reads one value. `out` collects its text; whoever uses it takes it from there."""

    def __init__(self) -> None:
        self.out: list[str] = []
        self.pending: list[str] = []
        """Read, but not yet in `out`, as it was."""
        self.is_done = False
        self.is_failed = False
        self._closers: list[str] = []
        self._state: Callable[[str, int], int] = self._value
        self._may_close = False
        self._is_key = False
        self._high = ""

    @property
    def in_quotes(self) -> bool:
        """Whether the next character belongs to a string."""
        return self._state in (self._string, self._escape, self._unicode)

    def feed(self, text: str, at: int = 0) -> int:
        """Read from `at`; returns where it stopped: at the end of the text, after the value, or at what is no JSON."""
        end = len(text)
        while at < end and not (self.is_done or self.is_failed):
            at = self._state(text, at)
        return at

    def take(self) -> str:
        """The text since the last call."""
        text = "".join(self.out)
        self.out.clear()
        return text

    def end(self) -> bool:
        """No more text comes: closes open brackets, if every value within them is whole. False if that is not so."""
        if self._state == self._number and not self._end_number():
            return False
        if self.is_done or self.is_failed:
            return self.is_done
        if not (self._state == self._after or (self._may_close and self._state in (self._value, self._key))):
            return False
        self.pending.clear()
        self.out.append("".join(reversed(self._closers)))
        self.is_done = True
        return True

    # --- states: each reads some text and returns where it stopped

    def _fail(self, at: int) -> int:
        self.is_failed = True
        return at

    def _skip_blanks(self, text: str, at: int) -> int:
        match = _blanks.match(text, at)
        end = at if match is None else match.end()
        if end > at:
            self.pending.append(text[at:end])
        return end

    def _write(self, text: str) -> None:
        """A token follows: what was pending before it stands."""
        if self.pending:
            self.out += self.pending
            self.pending.clear()
        self.out.append(text)

    def _value(self, text: str, at: int) -> int:
        at = self._skip_blanks(text, at)
        if at == len(text):
            return at
        char = text[at]
        if char == '"':
            self._write(char)
            self._state, self._is_key = self._string, False
        elif char in "{[":
            if len(self._closers) == MAX_DEPTH:
                return self._fail(at)
            self._write(char)
            self._closers.append(_CLOSERS[char])
            self._state, self._may_close = (self._key if char == "{" else self._value), True
        elif char in "-0123456789":
            self._write("")
            self._state = self._number
            return at
        elif char in "tfnTFN":
            self._write("")
            self._state = self._literal
            return at
        elif char == "]" and self._may_close:
            return self._close(at)
        else:
            return self._fail(at)
        return at + 1

    def _key(self, text: str, at: int) -> int:
        at = self._skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            self._write('"')
            self._state, self._is_key = self._string, True
            return at + 1
        return self._close(at) if text[at] == "}" and self._may_close else self._fail(at)

    def _colon(self, text: str, at: int) -> int:
        at = self._skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._write(":")
        self._state, self._may_close = self._value, False
        return at + 1

    def _after(self, text: str, at: int) -> int:
        at = self._skip_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self.pending.append(",")
            self._state, self._may_close = (self._key if self._closers[-1] == "}" else self._value), True
            return at + 1
        return self._close(at) if text[at] == self._closers[-1] else self._fail(at)

    def _close(self, at: int) -> int:
        if "," in self.pending:
            self.pending.remove(",")
        self._write(self._closers.pop())
        self._end_value()
        return at + 1

    def _end_value(self) -> None:
        self._state = self._after
        self.is_done = not self._closers

    def _string(self, text: str, at: int) -> int:
        char = text[at]
        if self._high and char != "\\":
            self._break_pair()
        run = _plain.match(text, at)
        if run is not None and not self._high:
            self.out.append(run[0])
            return run.end()
        if char == '"':
            self.out.append(char)
            if self._is_key:
                self._state = self._colon
            else:
                self._end_value()
        elif char == "\\":
            self.pending.append(char)
            self._state = self._escape
        else:
            self.out.append(json.dumps(char)[1:-1])
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        char = text[at]
        if char == "u":
            self.pending.append(char)
            self._state = self._unicode
            return at + 1
        if self._high:
            self._break_pair()
        self.pending.clear()
        if char in '"\\/bfnrt':
            self.out.append("\\" + char)
        elif char in "'\n":
            self.out.append("'" if char == "'" else "\\n")
        else:
            self.out.append("\\\\")  # a backslash that escapes nothing is one of the text
            self._state = self._string
            return at
        self._state = self._string
        return at + 1

    def _unicode(self, text: str, at: int) -> int:
        digits = "".join(self.pending)[2:]
        match = _hex.match(text, at, at + 4 - len(digits))
        end = at if match is None else match.end()
        self.pending.append(text[at:end])
        digits += text[at:end]
        if len(digits) < 4:
            if end == len(text):
                return end
            if self._high:
                self._break_pair()
            self.out.append("\\\\u" + digits)
        else:
            self._add_unit(digits)
        self.pending.clear()
        self._state = self._string
        return end

    def _add_unit(self, digits: str) -> None:
        unit = int(digits, 16)
        if self._high and unit in _LOW:
            self.out.append(f"{self._high}\\u{digits}")
            self._high = ""
            return
        if self._high:
            self._break_pair()
        if unit in _HIGH:
            self._high = f"\\u{digits}"
        else:
            self.out.append("\\ufffd" if unit in _LOW else f"\\u{digits}")

    def _break_pair(self) -> None:
        self.out.append("\\ufffd")
        self._high = ""

    def _number(self, text: str, at: int) -> int:
        digits = "".join(self.pending)
        match = _number_chars.match(text, at, at + MAX_NUMBER_CHARS + 1 - len(digits))
        end = at if match is None else match.end()
        digits += text[at:end]
        self.pending[:] = [digits]
        if end == len(text) and len(digits) <= MAX_NUMBER_CHARS:
            return end
        if not self._end_number():
            self.is_failed = True
        return end

    def _end_number(self) -> bool:
        digits = "".join(self.pending)
        if len(digits) > MAX_NUMBER_CHARS or _number.fullmatch(digits) is None:
            return False
        self._write("")
        self._end_value()
        return True

    def _literal(self, text: str, at: int) -> int:
        word = "".join(self.pending) + text[at]
        if not any(literal.startswith(word) for literal in _LITERALS):
            return self._fail(at)
        self.pending.append(text[at])
        if word in _LITERALS:
            self.pending.clear()
            self.out.append(_LITERALS[word])
            self._end_value()
        return at + 1
