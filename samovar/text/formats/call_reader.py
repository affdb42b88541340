"""CallReader: what readers of calls one after the other have in common, whatever a call looks like."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from samovar.text.formats.base import CallEnd, Failed, Piece, Tools

_blanks = re.compile(r"[ \t\r\n]*")


def after_blanks(text: str, at: int) -> int:
    """Where the blanks that begin at `at` end."""
    found = _blanks.match(text, at)
    return at if found is None else found.end()


class CallReader(ABC):
    """A machine of states. Each state is a method that reads some text and returns where it stopped.

    Calls may stand in a list (which the mark has already opened with `in_list`), with `,` or `;` or blanks between them.
    `prefix` may stand before everything. Text is kept until a call is given out, so that it can go on as content.
    """

    def __init__(self, tools: Tools, *, prefix: str = "", in_list: bool = False) -> None:
        self._tools = tools
        self._prefix = prefix
        self._pieces: list[Piece] = []
        self._raw: list[str] = []
        self._state: Callable[[str, int], int] = self._begin if prefix else self._between
        self._has_started = False
        """The open call has been given out."""
        self._in_list = in_list
        self._num_calls = 0
        self._is_settled = False
        """The last step ended or parted calls: nothing before it can become content any more."""
        self._is_failed = False

    def feed(self, text: str) -> Iterator[Piece]:
        """The pieces that `text` brings."""
        at = 0
        while at < len(text) and not self._is_failed:
            start, self._is_settled = at, False
            at = self._state(text, at)
            if self._is_settled:
                self._raw.clear()
            elif not self._has_started:
                self._raw.append(text[start:at])
        if self._is_failed:
            self._give_up(text[at:])
        return self._take()

    def close(self, *, is_complete: bool) -> Iterator[Piece]:
        """The region's end was seen, or (`is_complete` false) generation ended before it."""
        if not self._is_failed:
            if self._state not in (self._between, self._begin):
                self._close_call(is_complete)
            elif not self._num_calls:
                self._give_up("")
        return self._take()

    @abstractmethod
    def _open_call(self, text: str, at: int) -> int:
        """A call begins here, or nothing that is one."""

    @abstractmethod
    def _close_call(self, is_complete: bool) -> None:
        """The text ends within a call."""

    @abstractmethod
    def _held(self) -> list[str]:
        """What was read of the call that has started, but not given out."""

    def _count_call(self) -> None:
        """The open call is complete."""
        self._pieces.append(CallEnd())
        self._num_calls += 1
        self._is_settled = True
        self._has_started = False
        self._state = self._between

    def _take(self) -> Iterator[Piece]:
        pieces, self._pieces = self._pieces, []
        return iter(pieces)

    def _give_up(self, unread: str) -> None:
        self._is_failed = True
        self._pieces.append(Failed("".join(self._held() if self._has_started else self._raw), unread))

    def _fail(self, at: int) -> int:
        self._is_failed = True
        return at

    def _begin(self, text: str, at: int) -> int:
        """The prefix, if it comes."""
        so_far = "".join(self._raw)
        if text[at] == self._prefix[len(so_far)]:
            if len(so_far) + 1 == len(self._prefix):
                self._state = self._between
            return at + 1
        self._state = self._between
        return self._fail(at) if so_far else at

    def _between(self, text: str, at: int) -> int:
        start, at = at, after_blanks(text, at)
        if at > start:
            return at
        char = text[at]
        if char == "[" and not self._in_list:
            self._in_list = True
        elif char == "]" and self._in_list:
            self._in_list = False
            self._is_settled = self._num_calls > 0
        elif char in ",;" and self._num_calls:
            self._is_settled = True
        else:
            return self._open_call(text, at)
        return at + 1
