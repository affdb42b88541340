"""Reads answers in OpenAI's harmony format: messages with headers, whose channel and recipient say what they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, TypeAlias

from samovar.text.formats.base import AnswerPiece, Arguments, CallEnd, CallStart, Said, Thought, Tools
from samovar.text.formats.json_text import JsonText

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL, RETURN)

LONGEST_HEADER = 1000
"""Characters; what is longer was no header."""

Part: TypeAlias = Literal["opening", "role", "channel", "format", "thought", "said", "call", "between"]
"""Where the next text belongs. "opening" is the answer's first text, that may go on with a header begun in the prompt."""

_HEADER_PARTS: tuple[Part, ...] = ("opening", "role", "channel", "format")
_RECIPIENT = re.compile(r"(?:^|\s)to=(\S+)")
_HEADER_BEGINS = re.compile(r"\s*(?:$|t$|to$|to=)")
_CHANNEL = re.compile(r"\s*(\w*)")


class HarmonyReader:
    """One answer. Analysis is reasoning; what is addressed to a tool there is, is a call; everything else is content.

    Without `has_calls` nothing is a call.
    """

    def __init__(self, tools: Tools, begins_in_reasoning: bool, *, has_calls: bool = True) -> None:
        self._tools = tools
        self._has_calls = has_calls
        self._part: Part = "thought" if begins_in_reasoning else "opening"
        self._header: dict[str, str] = {}
        self._parted: dict[type[Thought] | type[Said], bool] = {Thought: False, Said: False}
        """Whether the next piece of a kind begins a new message after one that had text."""
        self._had: set[type[Thought] | type[Said]] = set()
        self._name = ""
        self._json = JsonText()
        self._is_call_open = False

    @property
    def is_thinking(self) -> bool:
        """The next text would be reasoning."""
        return self._part == "thought"

    def feed(self, text: str) -> Iterator[AnswerPiece]:
        """Text between marks."""
        return iter(list(self._feed(text)) if text else ())

    def feed_mark(self, mark: str) -> Iterator[AnswerPiece]:
        """A mark: headers end at their message, messages at the next mark that can follow one."""
        if mark == MESSAGE:
            return iter(list(self._begin_message()))
        if mark == CONSTRAIN:
            self._part = "format" if self._part in _HEADER_PARTS else self._part
            return iter(())
        pieces = list(self._end_message(is_complete=True))
        if mark == CHANNEL:
            keeps_role = self._part in ("opening", "role")
            self._header = {"role": self._header.get("role", "")} if keeps_role else {}
            self._part = "channel"
        else:
            self._header = {}
            self._part = "role" if mark == START else "between"
        return iter(pieces)

    def finish(self, *, is_complete: bool) -> Iterator[AnswerPiece]:
        """The answer is over."""
        pieces = list(self._end_message(is_complete=is_complete))
        if self._part == "opening" and (text := self._header.get("role")):
            pieces += self._tell(Said, text)
        self._part = "between"
        return iter(pieces)

    def _feed(self, text: str) -> Iterator[AnswerPiece]:
        if self._part in _HEADER_PARTS:
            yield from self._add_to_header(text)
        elif self._part == "thought":
            yield from self._tell(Thought, text)
        elif self._part == "call":
            yield from self._add_to_call(text)
        elif self._part == "said":
            yield from self._tell(Said, text)
        elif text := text.lstrip():
            yield from self._say_anew(text)

    def _say_anew(self, text: str) -> Iterator[AnswerPiece]:
        """Text that is in no message, or in one for a tool without being a call."""
        self._part = "said"
        self._parted[Said] = True
        yield from self._tell(Said, text)

    def _tell(self, kind: type[Thought] | type[Said], text: str) -> Iterator[AnswerPiece]:
        """Text of a message; several messages of a kind stand on lines of their own."""
        if self._parted[kind] and kind in self._had:
            text = "\n" + text
        self._parted[kind] = False
        self._had.add(kind)
        yield kind(text)

    # --- headers

    def _add_to_header(self, text: str) -> Iterator[AnswerPiece]:
        part = "role" if self._part == "opening" else self._part
        header = self._header[part] = self._header.get(part, "") + text
        is_header = self._part != "opening" or _HEADER_BEGINS.match(header) is not None
        if not is_header or len(header) > LONGEST_HEADER:
            self._header = {}
            self._part = "said"
            yield from self._tell(Said, header)

    def _begin_message(self) -> Iterator[AnswerPiece]:
        if self._part not in _HEADER_PARTS:
            yield from self._end_message(is_complete=True)
            self._header = {}
        found = _CHANNEL.match(self._header.get("channel", ""))
        channel = found[1] if found else ""
        addressed = [_RECIPIENT.search(self._header.get(part, "")) for part in ("channel", "role")]
        recipient = next((match[1] for match in addressed if match), "")
        name = recipient.removeprefix("functions.")
        is_known = name in self._tools or (not self._tools and name != recipient)
        if self._has_calls and name and is_known:
            self._part, self._name, self._json, self._is_call_open = "call", name, JsonText(), False
            return
        self._part = "thought" if channel == "analysis" else "said"
        self._parted = {Thought: True, Said: True}

    # --- bodies

    def _add_to_call(self, text: str) -> Iterator[AnswerPiece]:
        if not self._is_call_open:
            text = text.lstrip()
            if not text.startswith("{"):
                if text:
                    yield from self._say_anew(text)
                return
            self._is_call_open = True
            yield CallStart(self._name)
        at = self._json.feed(text)
        if given := self._json.take():
            yield Arguments(given)
        rest = text[at:].lstrip() if self._json.is_done else "".join(self._json.pending) + text[at:]
        if self._json.is_failed or (self._json.is_done and rest):
            yield from self._end_message(is_complete=False)
            yield from self._say_anew(rest)

    def _end_message(self, *, is_complete: bool) -> Iterator[AnswerPiece]:
        if self._part != "call":
            return
        self._part = "between"
        if not self._is_call_open:
            if is_complete:
                yield from (CallStart(self._name), Arguments("{}"), CallEnd())
        elif self._json.is_done or (is_complete and self._json.end()):
            if given := self._json.take():
                yield Arguments(given)
            yield CallEnd()
