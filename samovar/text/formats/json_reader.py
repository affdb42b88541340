"""Calls written as JSON: the reader that many formats share, and the grammar of such a call.

A call is an object with a name and arguments, in any order and among other keys. Once the name is known, the text of the
arguments is passed through as it comes. Calls may stand in a list, or after each other.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence

from samovar.core.tools import ToolDefinition
from samovar.text.formats.base import Arguments, CallEnd, CallStart, Tools
from samovar.text.formats.call_reader import CallReader, after_blanks
from samovar.text.formats.json_text import JsonText
from samovar.text.lark import Lark

NAME_KEYS = frozenset({"name", "tool_name"})
ARGUMENT_KEYS = frozenset({"arguments", "parameters", "args", "input"})
KNOWN_KEYS = NAME_KEYS | ARGUMENT_KEYS | {"function", "type", "id", "call_id", "index"}

_string_run = re.compile(r'[^"\\]+')


class EmbeddedJson:
    """JSON inside a JSON string: reads the string, and what it spells as a value."""

    def __init__(self) -> None:
        self._inner = JsonText()
        self._escape = ""
        self._high = ""
        self._is_open = False
        self._has_begun = False
        self.is_done = False
        self.is_failed = False
        self.in_quotes = True

    @property
    def pending(self) -> list[str]:
        """Read, but not given out."""
        return [*self._inner.pending, self._escape]

    def take(self) -> str:
        """The text of the value since the last call."""
        return self._inner.take()

    def end(self) -> bool:
        """No more text comes: whether the value is whole, perhaps after closing brackets."""
        return self._inner.end()

    def feed(self, text: str, at: int = 0) -> int:
        """Read from `at`, at first the opening quote; returns where it stopped."""
        while at < len(text) and not (self.is_done or self.is_failed):
            at = self._read(text, at)
        return at

    def _read(self, text: str, at: int) -> int:
        char = text[at]
        if not self._is_open:
            self._is_open = True
            return at + 1
        if self._escape:
            return self._read_escape(text, at)
        if char == "\\":
            self._escape = char
            return at + 1
        self._end_pair()
        if char == '"':
            if not self._has_begun:
                self._pass("{}")  # an empty string: no arguments
            self.in_quotes, self.is_done = False, self._inner.end()
            self.is_failed = not self.is_done
            return at + self.is_done
        run = _string_run.match(text, at)
        assert run is not None  # neither a quote nor a backslash
        return at + self._pass(run[0])

    def _read_escape(self, text: str, at: int) -> int:
        self._escape += text[at]
        wanted = 6 if self._escape[1] == "u" else 2
        if len(self._escape) < wanted:
            return at + 1
        try:
            char = json.loads(f'"{self._escape}"')
        except ValueError:
            char = self._escape
        if self._high and "\udc00" <= char <= "\udfff":
            char = json.loads(f'"{self._high}{self._escape}"')
            self._high = ""
        self._end_pair()
        if "\ud800" <= char <= "\udbff":
            self._high = self._escape
        else:
            self._pass("\ufffd" if "\udc00" <= char <= "\udfff" else char)
        if not self.is_failed:
            self._escape = ""
        return at + 1

    def _end_pair(self) -> None:
        if self._high:
            self._high = ""
            self._pass("\ufffd")

    def _pass(self, text: str) -> int:
        """Feed the value, an object; returns how much of the text it took. Around it only blanks may come."""
        used = 0
        if not self._has_begun:
            used = after_blanks(text, 0)
            if used == len(text):
                return used
            if text[used] != "{":
                self.is_failed = True
                return used
            self._has_begun = True
        used = self._inner.feed(text, used)
        if self._inner.is_done:
            used = after_blanks(text, used)
        self.is_failed = self._inner.is_failed or used < len(text)
        return used


class JsonCalls(CallReader):
    """Reads objects. At the end of a region, brackets that are missing are added.

    `known_keys`: an object with another key than calls have is no call (for formats without marks of their own).
    `new_id` makes the ids of the calls, where the format has a form for them.
    """

    def __init__(
        self,
        tools: Tools,
        *,
        known_keys: bool = False,
        new_id: Callable[[], str] | None = None,
        prefix: str = "",
        in_list: bool = False,
    ) -> None:
        super().__init__(tools, prefix=prefix, in_list=in_list)
        self._known_keys = known_keys
        self._new_id = new_id
        self._start_object()

    @property
    def in_quotes(self) -> bool:
        """Whether the next character belongs to a string."""
        return self._value is not None and self._value.in_quotes

    def _start_object(self) -> None:
        self._name: str | None = None
        self._call_id: str | None = None
        self._level = 0
        self._key_name = ""
        self._early: list[str] = []
        self._value: JsonText | EmbeddedJson | None = None
        self._has_started = False
        self._has_all = False

    def _held(self) -> list[str]:
        return [] if self._has_all or self._value is None else self._value.pending

    def _give_up(self, unread: str) -> None:
        if self._has_all:
            self._pieces.append(CallEnd())
        super()._give_up(unread)

    def _close_call(self, is_complete: bool) -> None:
        if self._has_all or (is_complete and self._complete()):
            self._end_call()
        elif is_complete or not self._has_started:
            self._give_up("")

    def _complete(self) -> bool:
        """Whether the open object only lacks brackets."""
        if self._state == self._after_value:
            return self._name is not None
        if self._has_started and self._value is not None and self._value.end():
            self._pass_arguments()
            return True
        return False

    # --- states

    def _open_call(self, text: str, at: int) -> int:
        if text[at] != "{":
            return self._fail(at)
        self._start_object()
        self._level = 1
        self._state = self._key
        return at + 1

    def _key(self, text: str, at: int) -> int:
        at = after_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == '"':
            self._value = JsonText()
            self._state = self._key_text
            return at
        if text[at] == "}":
            return self._close_level(at)
        return self._fail(at)

    def _key_text(self, text: str, at: int) -> int:
        assert isinstance(self._value, JsonText)
        at = self._value.feed(text, at)
        if self._value.is_done:
            self._key_name = json.loads(self._value.take())
            self._value = None
            if self._known_keys and self._key_name not in KNOWN_KEYS:
                return self._fail(at)
            self._state = self._colon
        return at

    def _colon(self, text: str, at: int) -> int:
        at = after_blanks(text, at)
        if at == len(text):
            return at
        if text[at] != ":":
            return self._fail(at)
        self._state = self._before_value
        return at + 1

    def _before_value(self, text: str, at: int) -> int:
        at = after_blanks(text, at)
        if at == len(text):
            return at
        char, key = text[at], self._key_name
        self._value = JsonText()
        self._state = self._skipped
        if self._name is None and (key in NAME_KEYS or (key == "function" and char == '"')):
            self._state = self._name_text if char == '"' else self._skipped
            return at if char == '"' else self._fail(at)
        if key in ARGUMENT_KEYS and not (self._has_all or self._early):
            if char not in '{"n':
                return self._fail(at)
            if char != "n":  # null: no arguments
                self._value = JsonText() if char == "{" else EmbeddedJson()
                self._state = self._arguments
        elif key == "function" and char == "{" and self._level == 1:
            self._value = None
            self._level = 2
            self._state = self._key
            return at + 1
        return at

    def _skipped(self, text: str, at: int) -> int:
        assert self._value is not None
        at = self._value.feed(text, at)
        self._value.take()
        return self._end_of_value(at)

    def _name_text(self, text: str, at: int) -> int:
        assert isinstance(self._value, JsonText)
        value = self._value
        at = value.feed(text, at)
        if value.is_done:
            self._name = json.loads(value.take())
            if not self._name or (self._tools and self._name not in self._tools):
                return self._fail(at)
        return self._end_of_value(at)

    def _arguments(self, text: str, at: int) -> int:
        assert self._value is not None
        at = self._value.feed(text, at)
        self._pass_arguments()
        return self._end_of_value(at)

    def _end_of_value(self, at: int) -> int:
        assert self._value is not None
        if self._value.is_failed:
            return self._fail(at)
        if self._value.is_done:
            self._value = None
            self._state = self._after_value
            if self._name is not None and self._early:
                self._pass_early()
        return at

    def _after_value(self, text: str, at: int) -> int:
        at = after_blanks(text, at)
        if at == len(text):
            return at
        if text[at] == ",":
            self._state = self._key
            return at + 1
        return self._close_level(at) if text[at] == "}" else self._fail(at)

    def _close_level(self, at: int) -> int:
        self._level -= 1
        self._state = self._after_value
        if not self._level:
            if self._name is None:
                return self._fail(at)
            self._end_call()
        return at + 1

    # --- giving out

    def _start_call(self) -> None:
        if not self._has_started:
            assert self._name is not None
            self._has_started = True
            self._raw.clear()
            call_id = self._call_id or (None if self._new_id is None else self._new_id())
            self._pieces.append(CallStart(self._name, call_id))

    def _pass_arguments(self) -> None:
        """What the arguments have brought, or later if the name is not known yet."""
        assert self._value is not None
        text = self._value.take()
        if self._name is None:
            self._early.append(text)
        elif text:
            self._start_call()
            self._pieces.append(Arguments(text))
        self._has_all = self._has_all or (self._name is not None and self._value.is_done)

    def _pass_early(self) -> None:
        self._start_call()
        self._pieces.append(Arguments("".join(self._early)))
        self._early.clear()
        self._has_all = True

    def _end_call(self) -> None:
        self._start_call()
        if not self._has_all:
            self._pieces.append(Arguments("{}"))
        self._count_call()
        self._start_object()


def call_object(lark: Lark, tool: ToolDefinition, *, before: str = "", arguments: str = "arguments") -> str:
    """The grammar of one call as an object, which begins with the text `before`."""
    opening = f'{before}{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "{arguments}": '
    return lark.seq(lark.text(opening), lark.json(tool.parameters or None), lark.text("}"))


def any_call(lark: Lark, tools: Sequence[ToolDefinition], *, before: str = "", arguments: str = "arguments") -> str:
    """The grammar of a call of any of the tools."""
    return lark.any_of(
        *(lark.rule(tool.name, call_object(lark, tool, before=before, arguments=arguments)) for tool in tools)
    )
