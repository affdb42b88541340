"""Calls as Mistral models write them: `name[ARGS]{...}` after a mark, or a list of JSON objects."""

from __future__ import annotations

import re
import secrets
import string

from samovar.text.formats.base import Tools
from samovar.text.formats.json_reader import JsonCalls
from samovar.text.formats.json_text import JsonText

OPEN, CALL_ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_ALPHABET = string.ascii_letters + string.digits
_name = re.compile(r"[\w.-]+")
MAX_NAME_CHARS = 300


def new_id() -> str:
    """The only form of ids that Mistral's templates take."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(9))


class MistralCalls(JsonCalls):
    """Reads both forms. The opening mark may come again before every call."""

    def __init__(self, tools: Tools) -> None:
        super().__init__(tools, new_id=new_id)
        self._word = ""

    def _open_call(self, text: str, at: int) -> int:
        if text[at] == "{":
            return super()._open_call(text, at)
        self._start_object()
        self._word = ""
        if self._in_list and text[at] == "T":
            self._word = "["
            self._state = self._again
        elif self._in_list or _name.match(text, at) is None:
            return self._fail(at)
        else:
            self._state = self._bare_name
        return at

    def _again(self, text: str, at: int) -> int:
        """The opening mark, of which the bracket was taken for that of a list."""
        if text[at] != OPEN[len(self._word)]:
            return self._fail(at)
        self._word += text[at]
        if self._word == OPEN:
            self._in_list = False
            self._state = self._between
        return at + 1

    def _bare_name(self, text: str, at: int) -> int:
        found = _name.match(text, at, at + MAX_NAME_CHARS + 1 - len(self._word))
        if found is not None:
            self._word += found[0]
            return found.end() if len(self._word) <= MAX_NAME_CHARS else self._fail(found.end())
        if text[at] not in "[{" or (self._tools and self._word not in self._tools):
            return self._fail(at)
        self._name, self._word = self._word, ""
        self._state = self._tag
        return at

    def _tag(self, text: str, at: int) -> int:
        """The mark of an id, or of the arguments, which may be left out."""
        if not self._word and text[at] in " \n{":
            self._value = JsonText()
            self._state = self._bare_arguments if text[at] == "{" else self._tag
            return at + (text[at] != "{")
        self._word += text[at]
        if not (CALL_ID.startswith(self._word) or ARGUMENTS.startswith(self._word)):
            return self._fail(at)
        if self._word in (CALL_ID, ARGUMENTS):
            self._state = self._tag if self._word == ARGUMENTS else self._bare_id
            self._word = ""
        return at + 1

    def _bare_id(self, text: str, at: int) -> int:
        if text[at] == "[":
            self._call_id, self._word = self._word or None, ""
            self._state = self._tag
            return at
        self._word += text[at]
        return at + 1 if len(self._word) <= MAX_NAME_CHARS else self._fail(at)

    def _bare_arguments(self, text: str, at: int) -> int:
        assert self._value is not None
        at = self._value.feed(text, at)
        self._pass_arguments()
        if self._value.is_failed:
            return self._fail(at)
        if self._value.is_done:
            self._end_call()
        return at
