"""Calls written as Python: `[f(a=1), g(b="x")]`. Read as literals, never run."""

from __future__ import annotations

import re

from samovar.text.formats.base import Arguments, CallStart, Tools
from samovar.text.formats.call_reader import CallReader
from samovar.text.formats.python_text import PythonText

MAX_NAME_CHARS = 300
_name_chars = re.compile(r"[\w.-]*")


class PythonCalls(CallReader):
    """Reads calls with keyword arguments."""

    def __init__(self, tools: Tools, *, prefix: str = "") -> None:
        super().__init__(tools, prefix=prefix)
        self._name = ""
        self._arguments = PythonText()

    @property
    def in_quotes(self) -> bool:
        """Whether the next character belongs to a string."""
        return self._arguments.in_quotes

    def _held(self) -> list[str]:
        return self._arguments.pending

    def _close_call(self, is_complete: bool) -> None:
        if is_complete or not self._has_started:
            self._give_up("")

    # --- states

    def _open_call(self, text: str, at: int) -> int:
        if not text[at].isidentifier():
            return self._fail(at)
        self._name = ""
        self._state = self._call_name
        return at

    def _call_name(self, text: str, at: int) -> int:
        found = _name_chars.match(text, at, at + MAX_NAME_CHARS + 1 - len(self._name))
        end = at if found is None else found.end()
        self._name += text[at:end]
        if len(self._name) > MAX_NAME_CHARS:
            return self._fail(end)
        if end < len(text):
            if text[end] != "(" or (self._tools and self._name not in self._tools):
                return self._fail(end)
            self._arguments = PythonText()
            self._state = self._read_arguments
        return end

    def _read_arguments(self, text: str, at: int) -> int:
        reader = self._arguments
        at = reader.feed(text, at)
        self._is_failed = reader.is_failed
        if not self._has_started and len(reader.out) > 1:  # more than the opening bracket
            self._has_started = True
            self._raw.clear()
            self._pieces.append(CallStart(self._name))
        if self._has_started and (json_text := reader.take()):
            self._pieces.append(Arguments(json_text))
        if reader.is_done:
            self._count_call()
        return at
