"""CustomInput: the arguments of a custom tool's call, `{"input": "..."}`, piece by piece -> the input as text."""

from __future__ import annotations

import json
import re

from samovar.server.responses.tools import INPUT

MAX_HEAD_CHARS = 256
"""Before the string begins, no more than this is looked at again and again."""

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HEAD_BEGINS = re.compile(r"[\s{]*(\"[a-z]*\"?)?[\s:]*")
_HEX = "[0-9a-fA-F]"
_HIGH, _LOW = rf"\\u[dD][89abAB]{_HEX}{{2}}", rf"\\u[dD][c-fC-F]{_HEX}{{2}}"
_UNITS = re.compile(rf'(?:[^"\\]+|\\["\\/bfnrt]|\\u(?![dD][89a-fA-F]){_HEX}{{4}}|{_HIGH}{_LOW})*')
"""Whole characters of a JSON string."""
_UNDECIDED = re.compile(rf"\\(?:u{_HEX}{{0,3}})?|{_HIGH}(?:\\(?:u{_HEX}{{0,3}})?)?")
"""What may become a character when more comes."""
_decode = json.JSONDecoder(strict=False).decode
_BROKEN = re.compile(rf"\\(?:u{_HEX}{{4}})?")
"""Half of a surrogate pair, or an escape that JSON does not know; the latter is given out as it is."""


class CustomInput:
    """Gives out the string as it comes. Other arguments than expected are held until the end, and given out then:
    the only string of an object, or the arguments as they are."""

    __slots__ = ("_held", "_is_open", "_is_over", "_whole")

    def __init__(self) -> None:
        self._whole: list[str] = []
        self._held = ""
        self._is_open = False
        self._is_over = False

    def feed(self, piece: str) -> str:
        """The next piece of the arguments -> the next piece of the input."""
        if not self._is_open:
            self._whole.append(piece)
        if self._is_over:
            return ""
        self._held += piece
        if not self._is_open:
            head = _HEAD.match(self._held)
            if head is None:
                is_like_head = len(self._held) <= MAX_HEAD_CHARS and _HEAD_BEGINS.fullmatch(self._held) is not None
                self._is_over = not is_like_head  # if something else: `close` looks at all of it
                return ""
            self._is_open, self._held = True, self._held[head.end() :]
            self._whole = []
        return self._take()

    def _take(self) -> str:
        """The whole characters of what is held."""
        held, at, parts = self._held, 0, []
        while True:
            units = _UNITS.match(held, at)
            assert units is not None  # it may be empty
            parts.append(_unescaped(units[0]))
            at = units.end()
            if at == len(held) or _UNDECIDED.fullmatch(held, at):
                break
            broken = _BROKEN.match(held, at)
            if broken is None:  # the end of the string
                self._is_over, at = True, len(held)
                break
            at = broken.end()
            parts.append("\ufffd" if broken[0] != "\\" else broken[0])
        self._held = held[at:]
        return "".join(parts)

    def close(self) -> str:
        """What is left to give out when the call has ended."""
        if self._is_open:
            return ""
        whole = "".join(self._whole)
        try:
            value = json.loads(whole)
        except (ValueError, RecursionError):
            return whole
        if isinstance(value, dict) and len(value) == 1:
            (only,) = value.values()
            if isinstance(only, str):
                return only.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        return whole


def _unescaped(text: str) -> str:
    """Whole characters of a JSON string -> their text."""
    return str(_decode(f'"{text}"')) if "\\" in text else text
