"""Keeps text of a conversation from becoming control tokens, whatever a template does with it.

A template may cut, delete, join or change the text it is given, so looking for whole tokens before rendering is not
enough. Every place where a token could begin is taken by a private-use character that occurs nowhere else; so is the
first character of a text that could go on with, or fill, a token that the template began. After rendering the
characters are put back and their places noted: no token that touches one of these is meant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jinja2.nodes

from samovar.text.matching import NEVER, any_of, beginnings

KNOWN_ROLES = frozenset(
    {
        *("system", "user", "assistant", "tool", "developer", "function", "model", "ipython", "observation"),
        *("environment", "tool_response", "tool_result", "tool_call", "documents", "document", "available_tools"),
        *("platform", "chatbot", "critic", "latest_reminder"),
    }
)
"""Roles that templates write between marks on purpose."""
_SHAPE = frozenset({"role", "content", "type", "text"})
"""Keys of messages and parts that are ours to read."""
_KNOWN_CHARS = 64
"""How much of a text that a template mentions is compared."""
_FIRST_PRIVATE = 0x100000
_PRIVATE = re.compile("[\U00100000-\U0010ffff]")
_ESCAPED = re.compile(r"\\U0010[0-9a-f]{4}|\\udb[c-f][0-9a-f]\\ud[c-f][0-9a-f]{2}")
"""Private-use characters as Python and JSON escape them."""
_READERS = (
    *(jinja2.nodes.Compare, jinja2.nodes.Getitem, jinja2.nodes.Call, jinja2.nodes.Filter, jinja2.nodes.Test),
    jinja2.nodes.For,
)
"""Expressions that look something up or compare it."""


@dataclass(frozen=True, slots=True)
class Mentioned:
    """What a template's expressions speak of by name: it must find these in the text it is given."""

    constants: frozenset[str] = frozenset()
    """Every string constant."""
    names: frozenset[str] = frozenset()
    """Attributes, and the constants it looks up or compares with."""

    @classmethod
    def by(cls, tree: jinja2.nodes.Template) -> Mentioned:
        """From a template's syntax tree."""
        names = {node.attr for node in tree.find_all(jinja2.nodes.Getattr)}
        for reader in tree.find_all(_READERS):
            names |= _constants(reader.iter if isinstance(reader, jinja2.nodes.For) else reader)
        return cls(frozenset(_constants(tree)), frozenset(names))

    def __or__(self, other: Mentioned) -> Mentioned:
        return Mentioned(self.constants | other.constants, self.names | other.names)


def _constants(node: jinja2.nodes.Node) -> set[str]:
    own = [node] if isinstance(node, jinja2.nodes.Const) else []
    return {const.value for const in [*own, *node.find_all(jinja2.nodes.Const)] if isinstance(const.value, str)}


@dataclass(frozen=True, slots=True)
class ControlTokens:
    """The texts that must not be forged: special tokens, and for client text also added tokens the template uses."""

    texts: tuple[str, ...] = ()
    special: re.Pattern[str] = NEVER
    """What to hide in an assistant's words: special tokens, and where one could begin."""
    all: re.Pattern[str] = NEVER
    """What to hide in all other text: the same for every control token."""
    ends: frozenset[str] = frozenset()
    """Every proper ending of every token."""
    inside: str = ""
    """All tokens, to look for a text in."""
    longest: int = 0
    names: frozenset[str] = frozenset()
    """Texts that stay as they are although they stand inside a control token."""

    @classmethod
    def of(cls, added: Mapping[str, bool], sources: Iterable[str], mentioned: Mentioned) -> ControlTokens:
        """From added token text -> is special, and the templates: their sources and what they mention."""
        source = "\0".join(sources)
        special = [text for text, is_special in added.items() if is_special and text.strip()]
        used = [text for text, is_special in added.items() if not is_special and _is_mark(text) and text in source]
        texts = (*special, *used)
        known = {*mentioned.constants, *added}
        return cls(
            texts,
            _places(special, known),
            _places(texts, known),
            frozenset(text[n:] for text in texts for n in range(1, len(text))),
            "\0".join(texts),
            max(map(len, texts), default=0),
            mentioned.names | _SHAPE,
        )

    def goes_on(self, text: str) -> bool:
        """Whether `text` could fill or end a control token that stands around or before it."""
        body = text.strip()
        if not body:
            return False
        if len(body) < self.longest and body in self.inside:
            return body not in self.names
        return any(form[:n] in self.ends for form in (body, text) for n in range(1, min(len(form), self.longest)))


def _is_mark(text: str) -> bool:
    """Added tokens that are words or white space are ordinary text in every place."""
    return any(not (char.isalnum() or char.isspace() or char in "\u2581_") for char in text)


def _places(texts: Collection[str], known: Iterable[str]) -> re.Pattern[str]:
    """Finds whole `texts`, and elsewhere the mark that one of them begins with.

    A mark is left alone where one of the `known` texts begins, unless that could itself be the beginning of a token.
    """
    marks = {next(filter(_is_mark, text)) for text in texts if _is_mark(text)}
    if not marks:
        return any_of(texts)
    could_be = {*texts, *beginnings(texts)}
    free = {text[n : n + _KNOWN_CHARS] for text in known for n, char in enumerate(text) if char in marks} - could_be
    single = "".join(map(re.escape, sorted(marks)))
    firsts = "".join(map(re.escape, sorted(marks | {text[0] for text in texts})))
    either = f"{any_of(texts).pattern}|(?!{any_of(free).pattern})[{single}]"
    return re.compile(f"(?=[{firsts}])(?:{either})", re.DOTALL)


class _Hidden(str):
    """A text with hidden characters that still answers whether it holds one certain character, as `'<' in text`."""

    whole: str

    def __contains__(self, sought: object) -> bool:
        return isinstance(sought, str) and (sought in self.whole if len(sought) == 1 else super().__contains__(sought))


class Shield:
    """Hides the control tokens of one conversation behind private-use characters, and brings them back."""

    def __init__(self, controls: ControlTokens, source: str, *data: Any) -> None:
        """`source` and `data` are everything whose characters can be in the result."""
        self._controls = controls
        self._texts = [source, *strings_in(data)]
        self._used: set[str] | None = None
        self._next = _FIRST_PRIVATE
        self._char: dict[str, str] = {}
        self._text: dict[str, str] = {}

    def new_char(self) -> str:
        """A character that occurs nowhere in the conversation or the template."""
        if self._used is None:
            texts = [text for text in self._texts if not text.isascii()]
            escaped = [text for text in self._texts if "\\" in text]
            self._used = {found for text in texts for found in _PRIVATE.findall(text)}
            self._used.update(found for text in escaped for found in _ESCAPED.findall(text))
        while not self._used.isdisjoint(_forms(char := chr(self._next))):
            self._next += 1
        self._next += 1
        return char

    def message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message without control tokens; what the assistant said keeps marks that are not special tokens."""
        role = message["role"]
        hidden: dict[str, Any] = self._hide(
            message, self._controls.special if role == "assistant" else self._controls.all
        )
        return hidden | {"role": role} if role in KNOWN_ROLES else hidden

    def variables(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Template variables without control tokens in their values."""
        return {name: self.client(value) for name, value in variables.items()}

    def client(self, value: Any) -> Any:
        """Data without control tokens."""
        return self._hide(value, self._controls.all)

    def _hide(self, value: Any, places: re.Pattern[str]) -> Any:
        if isinstance(value, dict):
            return {self._hide(key, places): self._hide(item, places) for key, item in value.items()}
        if isinstance(value, list):
            return [self._hide(item, places) for item in value]
        if not isinstance(value, str) or not self._controls.texts:
            return value
        text = places.sub(lambda match: self._stand_in(match[0]), value)
        at = len(text) - len(text.lstrip())
        if self._controls.goes_on(value) and text[at] == value[at]:
            text = text[:at] + self._stand_in(text[at]) + text[at + 1 :]
        if text == value:
            return value
        hidden = _Hidden(text)
        hidden.whole = value
        return hidden

    def _stand_in(self, text: str) -> str:
        if text not in self._char:
            self._char[text] = char = self.new_char()
            self._text[char] = text
        return self._char[text]

    def restore(self, rendered: str) -> tuple[str, tuple[tuple[int, int], ...]]:
        """Put the texts back, also where a template wrote escapes for them; returns text and places."""
        if not self._text:
            return rendered, ()
        back = dict(self._text)
        if "\\" in rendered:
            back = {form: text for char, text in self._text.items() for form in _forms(char)}
        found = any_of(back) if len(back) > len(self._text) else re.compile("[" + "".join(back) + "]")
        parts: list[str] = []
        literal: list[tuple[int, int]] = []
        done = size = 0
        for match in found.finditer(rendered):
            text = back[match[0]]
            parts += [rendered[done : match.start()], text]
            size += match.start() - done
            literal.append((size, size + len(text)))
            size += len(text)
            done = match.end()
        return "".join([*parts, rendered[done:]]), tuple(literal)


def _forms(char: str) -> tuple[str, str, str]:
    """A private-use character as it stands, in JSON, and as Python shows it inside a list or an object."""
    return char, json.dumps(char)[1:-1], repr(char)[1:-1]


def strings_in(value: Any) -> list[str]:
    """Every string in nested data, keys included."""
    found: list[str] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Mapping):
            stack += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            stack += item
    return found
