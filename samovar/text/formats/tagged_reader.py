"""Reads calls written in tags, one tag a parameter, whose values are raw text: what differs is a record of the tags."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from samovar.text.formats.argument_values import ANY, STRING, ArgumentValue, Kinds, ParameterKinds, quoted
from samovar.text.formats.base import Arguments, CallEnd, CallStart, Failed, Piece, Tools

LONGEST_NAME = 256
"""Characters of a function's or parameter's name, with what stands around it in its tag."""

_NON_BLANK = re.compile(r"\S")
_NO_NAME = re.compile(r"[\s<>\"'{}()\[\]]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """The tags of one format, each up to the text that varies. Every tag begins with "<" and holds no other.

    With an empty `call` a region is one call and begins with its name; with an empty `call_end` it ends with the region.
    `value` stands between a key and its value. `framed`: a line break after the tag before a value and before the tag
    after it is not part of the value. `bare_call`: a region may begin with what follows `call`, for a tool there is.
    """

    call: str
    call_end: str
    key: str
    key_end: str = ">"
    value: str = ""
    value_end: str
    framed: bool = False
    bare_call: bool = False


class TaggedReader:
    """One region. After a call's name nothing fails any more: what is no tag between parameters is passed over."""

    def __init__(self, tags: Tags, tools: Tools) -> None:
        self._tags = tags
        self._tools = tools
        self._text = ""
        self._at = 0
        self._out: list[Piece] = []
        self._state: Callable[[], bool] = self._before_call
        self._is_first = True
        self._is_bare = False
        self._blanks: list[str] = []
        self._kinds = ParameterKinds(None)
        self._num_arguments = 0
        self._key = ""
        self._value = ArgumentValue(STRING)
        self._ends = ValueEnd(tags, self._value)

    @property
    def in_quotes(self) -> bool:
        """Within a value that may hold any text; it ends with its own tag only."""
        return self._state == self._in_value and (self._value.may_be_text or self._ends.in_string)

    def feed(self, text: str) -> Iterator[Piece]:
        """The next text of the region."""
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._state():
            pass
        return self._given_out()

    def close(self, *, is_complete: bool) -> Iterator[Piece]:
        """The end of the region: a call that lacks only its own end is complete if the region is."""
        rest = self._text[self._at :]
        if self._state == self._before_call and (self._is_first or rest):
            self._fail(is_over=True)
        if self._state == self._in_name and (self._tags.call or not is_complete or not self._start_call(rest)):
            self._fail(is_over=True)
        if is_complete and self._state == self._in_value:
            self._give(self._value.feed(rest.removesuffix("\n") if self._tags.framed else rest))
            self._give(self._value.end())
        if is_complete and self._state in (self._between, self._in_key, self._before_value, self._in_value):
            self._end_call()
        self._state = self._over
        return self._given_out()

    def _given_out(self) -> Iterator[Piece]:
        out, self._out = self._out, []
        return iter(out)

    def _give(self, text: str) -> None:
        if text:
            self._out.append(Arguments(text))

    def _fail(self, *, is_over: bool = False) -> bool:
        """What was read since the last call is text; from here on marks count again."""
        if self._state != self._over:
            tag = self._tags.call if self._state == self._in_name and not self._is_bare else ""
            held, rest = "".join(self._blanks) + tag, self._text[self._at :]
            self._out.append(Failed(held + rest) if is_over else Failed(held, rest))
        self._state = self._over
        return False

    def _over(self) -> bool:
        self._text, self._at = "", 0
        return False

    def _go(self, state: Callable[[], bool]) -> bool:
        self._state = state
        return True

    def _before_call(self) -> bool:
        """Blanks, then a call's tag."""
        found = _NON_BLANK.search(self._text, self._at)
        start, self._at = self._at, found.start() if found else len(self._text)
        self._blanks.append(self._text[start : self._at])
        if not found:
            return False
        call = self._tags.call
        if self._text.startswith(call, self._at):
            self._at += len(call)
            return self._go(self._in_name)
        if call.startswith(self._text[self._at : self._at + len(call)]):
            return False
        self._is_bare = self._is_first and self._tags.bare_call
        return self._go(self._in_name) if self._is_bare else self._fail()

    def _in_name(self) -> bool:
        """A call's name, up to the end of its tag or up to the first key."""
        tags = self._tags
        end = self._text.find(">" if tags.call else "<", self._at)
        if end < 0 or end - self._at > LONGEST_NAME:
            return self._fail() if len(self._text) - self._at > LONGEST_NAME else False
        if not tags.call and not self._text.startswith(tags.key, end):
            return False if tags.key.startswith(self._text[end:]) else self._fail()
        head, after = self._text[self._at : end], end + 1 if tags.call else end
        if not self._start_call(head):
            return self._fail()
        self._at = after
        return True

    def _start_call(self, head: str) -> bool:
        name = _name_and_rest(head)[0]
        is_known = name in self._tools or not (self._tools or self._is_bare)
        if not name or _NO_NAME.search(name) or not is_known:
            return False
        self._blanks.clear()
        self._out.append(CallStart(name))
        self._kinds = ParameterKinds(self._tools.get(name))
        self._num_arguments = 0
        self._is_first = self._is_bare = False
        return self._go(self._between)

    def _end_call(self) -> bool:
        self._give("}" if self._num_arguments else "{}")
        self._out.append(CallEnd())
        return self._go(self._before_call)

    def _next_tag(self, *tags: str) -> str | None:
        """Passes over text up to the first of these tags, and it; None: not there yet."""
        while (found := self._text.find("<", self._at)) >= 0:
            self._at = found
            if tag := next((tag for tag in tags if tag and self._text.startswith(tag, found)), None):
                self._at += len(tag)
                return tag
            if any(tag.startswith(self._text[found : found + len(tag)]) for tag in tags if tag):
                return None
            self._at += 1
        self._at = len(self._text)
        return None

    def _between(self) -> bool:
        tags = self._tags
        tag = self._next_tag(tags.key, tags.call_end, tags.call)
        if tag is None:
            return False
        if tag == tags.key:
            return self._go(self._in_key)
        self._end_call()
        return self._go(self._in_name if tag == tags.call else self._before_call)

    def _in_key(self) -> bool:
        end = self._text.find(self._tags.key_end, self._at)
        if end < 0 or end - self._at > LONGEST_NAME:
            is_hopeless = len(self._text) - self._at > LONGEST_NAME + len(self._tags.key_end)
            return self._go(self._between) if is_hopeless else False
        self._key = self._text[self._at : end]
        self._at = end + len(self._tags.key_end)
        return self._go(self._before_value) if self._tags.value else self._start_value()

    def _before_value(self) -> bool:
        tags = self._tags
        tag = self._next_tag(tags.value, tags.key)
        if tag is None:
            return False
        return self._start_value() if tag == tags.value else self._go(self._in_key)

    def _start_value(self) -> bool:
        key, rest = _name_and_rest(self._key)
        self._value = ArgumentValue(_flagged(self._kinds.of(key), rest))
        self._ends = ValueEnd(self._tags, self._value)
        self._give(("{" if self._num_arguments == 0 else ", ") + quoted(key) + ": " + self._value.begin())
        self._num_arguments += 1
        return self._go(self._in_value)

    def _in_value(self) -> bool:
        start, stop, after = self._ends.find(self._text, self._at)
        self._give(self._value.feed(self._text[start:stop]))
        self._at = stop if after is None else after
        if after is None:
            return False
        self._give(self._value.end())
        return self._go(self._between)


class ValueEnd:
    """Where a value ends: at its tag, but within an array or object not inside of one of its strings."""

    def __init__(self, tags: Tags, value: ArgumentValue) -> None:
        self._tag = tags.value_end
        self._framed = tags.framed
        self._value = value
        self._at_start = True
        self._is_json: bool | None = None
        self.in_string = False
        """Within a string of the value's JSON."""
        self._tokens = re.compile(rf'\\["\\]|["\n]|{re.escape(self._tag)}')

    def find(self, text: str, at: int) -> tuple[int, int, int | None]:
        """Of `text` from `at` on: where the value's part begins and stops, and where its tag ends, if that is there."""
        if self._at_start and at < len(text):
            self._at_start = False
            at += self._framed and text[at] == "\n"
        if self._is_json is None and (first := _NON_BLANK.search(text, at)):
            self._is_json = self._value.may_begin_container(first[0])
        end = self._outside_strings(text, at) if self._is_json else text.find(self._tag, at)
        if end >= 0:
            stop = end - 1 if self._framed and end > at and text[end - 1] == "\n" else end
            return at, stop, end + len(self._tag)
        return at, max(at, len(text) - self._num_held(text)), None

    def _outside_strings(self, text: str, at: int) -> int:
        for found in self._tokens.finditer(text, at):
            if found[0] == '"':
                self.in_string = not self.in_string
            elif found[0] == "\n":  # no JSON string goes over a line's end: this one was never closed
                self.in_string = False
            elif found[0] == self._tag and not self.in_string:
                return found.start()
        return -1

    def _num_held(self, text: str) -> int:
        """How much of the text's end may yet belong to the tag, or is half of an escape."""
        start = text.rfind("<", max(0, len(text) - len(self._tag)))
        if start >= 0 and self._tag.startswith(text[start:]):
            return len(text) - start + (self._framed and text[:start].endswith("\n"))
        if self._is_json and text.endswith("\\"):
            return 1
        return int(self._framed and text.endswith("\n"))


def is_name(text: str) -> bool:
    """Whether a name can stand in a tag and is read back from it."""
    return 0 < len(text) <= LONGEST_NAME // 2 and not _NO_NAME.search(text)


def _name_and_rest(head: str) -> tuple[str, str]:
    """A name and the attributes after it: `f`, `"f"`, `f"` and `f" string="true"` are all written."""
    name, _, rest = head.strip().removeprefix('"').partition('"')
    return name, rest


def _flagged(kinds: Kinds, attributes: str) -> Kinds:
    """The types of a value whose tag may say itself whether it is a string."""
    if 'string="true"' in attributes and "string" in kinds:
        return STRING
    if 'string="false"' in attributes:
        return kinds - STRING or ANY - STRING
    return kinds
