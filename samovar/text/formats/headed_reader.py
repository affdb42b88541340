"""HeadedCalls: a name, a mark, then the arguments as JSON, and something that ends the call."""

from __future__ import annotations

from samovar.text.formats.base import Tools
from samovar.text.formats.call_reader import after_blanks
from samovar.text.formats.json_reader import EmbeddedJson, JsonCalls
from samovar.text.formats.json_text import JsonText

MAX_HEAD_CHARS = 600


class HeadedCalls(JsonCalls):
    """Every call is `begin`, a head with the name, `separator`, the arguments, and the texts of `tail`.

    Blanks may stand between these.
    """

    def __init__(self, tools: Tools, *, begin: str, separator: str, tail: tuple[str, ...]) -> None:
        super().__init__(tools)
        self._beginning, self._separator, self._tail = begin, separator, tail
        self._head = ""
        self._expected: list[str] = []
        self._num_matched = 0

    def _read_head(self, head: str) -> bool:
        """Take name and id from the head; returns whether it is whole."""
        self._name = head.strip()
        return True

    # --- states

    def _between(self, text: str, at: int) -> int:
        start, at = at, after_blanks(text, at)
        return at if at > start else self._open_call(text, at)

    def _open_call(self, text: str, at: int) -> int:
        self._start_object()
        self._head = ""
        self._expected, self._num_matched = [self._beginning], 0
        self._state = self._literals
        return self._literals(text, at)

    def _literals(self, text: str, at: int) -> int:
        """The texts that must come, before the head or after the arguments."""
        if not self._num_matched:
            start, at = at, after_blanks(text, at)
            if at > start:
                return at
        literal = self._expected[0]
        if text[at] != literal[self._num_matched]:
            return self._fail(at)
        self._num_matched += 1
        if self._num_matched == len(literal):
            self._num_matched = 0
            del self._expected[0]
            if not self._expected:
                self._next_part()
        return at + 1

    def _next_part(self) -> None:
        if self._has_all:
            self._end_call()
        else:
            self._state = self._read_name

    def _read_name(self, text: str, at: int) -> int:
        self._head += text[at]
        if self._head.endswith(self._separator):
            head, self._head = self._head.removesuffix(self._separator), ""
            if self._read_head(head):
                self._state = self._before_arguments
                if not self._name or (self._tools and self._name not in self._tools):
                    return self._fail(at + 1)
        elif len(self._head) > MAX_HEAD_CHARS:
            return self._fail(at + 1)
        return at + 1

    def _before_arguments(self, text: str, at: int) -> int:
        at = after_blanks(text, at)
        if at == len(text):
            return at
        if text[at] not in '{"':
            return self._fail(at)
        self._value = JsonText() if text[at] == "{" else EmbeddedJson()
        self._state = self._read_arguments
        return at

    def _read_arguments(self, text: str, at: int) -> int:
        assert self._value is not None
        at = self._value.feed(text, at)
        self._pass_arguments()
        if self._value.is_failed:
            return self._fail(at)
        if self._value.is_done:
            self._value = None
            self._expected = list(self._tail)
            self._state = self._literals
            if not self._expected:
                self._end_call()
        return at
