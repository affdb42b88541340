"""Marks in streamed text: special tokens as single characters, and a search that holds back what may become a mark.

A special token travels through stop strings and the region parser as one lone surrogate, which no decoded text can hold.
So a mark that is a special token matches by id only, and its spelling with ordinary tokens is ordinary text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from samovar.text.tokenizer import SpanTokenizer, Tokenizer

_FIRST_SYMBOL, _NUM_SYMBOLS = 0xD800, 0x800
_symbol = re.compile("[\ud800-\udfff]")


class Alphabet:
    """The special tokens that one request's text may hold, each with a symbol of its own.

    `tokens` are those that occur in marks. Other special tokens get a symbol when they are first met, and are left out
    of shown text with `hides_special`; so are special tokens of marks where they mark nothing.
    """

    def __init__(self, tokens: Mapping[int, tuple[str, bool]], *, hides_special: bool = True) -> None:
        self.symbols: dict[int, str] = {}
        self.marks: frozenset[int] = frozenset(tokens)
        self._spelling: dict[str, str] = {}
        self._shown: dict[int, str] = {}
        self._hides_special = hides_special
        for token, (text, is_special) in tokens.items():
            self.add(token, text, is_special=is_special)
        self._by_length = sorted(((text, symbol) for symbol, text in self._spelling.items()), key=lambda t: -len(t[0]))

    def add(self, token: int, text: str, *, is_special: bool = True) -> str:
        """The symbol of a token; of further ones than there are symbols, the text."""
        if (known := self.symbols.get(token)) is not None:
            return known
        if len(self.symbols) == _NUM_SYMBOLS:
            return "" if is_special and self._hides_special else text
        symbol = chr(_FIRST_SYMBOL + len(self.symbols))
        self.symbols[token] = symbol
        self._spelling[symbol] = text
        self._shown[ord(symbol)] = "" if is_special and self._hides_special else text
        return symbol

    def write(self, mark: str) -> str:
        """A mark, or a client's stop string, with symbols for the mark tokens in it."""
        for text, symbol in self._by_length:
            mark = mark.replace(text, symbol)
        return mark

    def show(self, text: str) -> str:
        """Text for people: hidden tokens left out."""
        return text if not self._spelling or text.isascii() else text.translate(self._shown)

    def spell(self, text: str) -> str:
        """Text with every special token written out."""
        if not self._spelling or text.isascii():
            return text
        return _symbol.sub(lambda found: self._spelling.get(found[0], "\ufffd"), text)

    def tail(self, text: str, spelled: str) -> str:
        """The end of `text` that is `spelled` when spelled; what `spelled` has before all of `text` stays as it is."""
        if not has_symbol(text):
            return spelled
        at, left = len(text), len(spelled)
        while at and left > 0:
            at -= 1
            left -= len(self._spelling.get(text[at], " "))
        if left >= 0:
            return spelled[:left] + text[at:]
        return self.spell(text[at])[-left:] + text[at + 1 :]  # it begins within a token


def alphabet_of(tokenizer: Tokenizer | None, marks: Iterable[str], *, hides_special: bool = True) -> Alphabet:
    """The alphabet for these marks, by what the tokenizer has as added tokens."""
    if not isinstance(tokenizer, SpanTokenizer):
        return Alphabet({}, hides_special=hides_special)
    tokens = _mark_tokens(tokenizer, tuple(marks))  # type: ignore[arg-type]  # hashed by identity
    return Alphabet(tokens, hides_special=hides_special)


@lru_cache(maxsize=32)
def _mark_tokens(tokenizer: SpanTokenizer, marks: tuple[str, ...]) -> Mapping[int, tuple[str, bool]]:
    """Added tokens that occur in the marks: id -> text, and whether it is special."""
    found = {}
    for text, is_special in tokenizer.added_tokens.items():
        if text.strip() and any(text in mark for mark in marks):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == 1:
                found[ids[0]] = (text, is_special)
    return found


class MarkFinder:
    """Finds the first of some marks. At one position the longest counts; what may still become one is held back."""

    def __init__(self, marks: tuple[str, ...]) -> None:
        self.marks = tuple(sorted({mark for mark in marks if mark}, key=lambda mark: (-len(mark), mark)))
        self._pattern = re.compile("|".join(map(re.escape, self.marks)) or r"(?!)")
        self._first = re.compile("|".join(re.escape(c) for c in sorted({mark[0] for mark in self.marks})) or r"(?!)")
        self._longest = max(map(len, self.marks), default=1)

    def find(self, text: str, *, final: bool = False) -> tuple[int, str | None]:
        """Where the first mark begins, and it; or where what may become one begins, and None. `final`: no more comes."""
        if self._first.search(text) is None:
            return len(text), None
        found = self._pattern.search(text)
        if not final:
            held = self._tail(text)
            if found is None or held <= found.start():
                return held, None
        return (len(text), None) if found is None else (found.start(), found[0])

    def at_start(self, text: str, *, final: bool = False) -> str | bool:
        """The mark that the text begins with; otherwise whether it may become one."""
        if not final and any(len(mark) > len(text) and mark.startswith(text) for mark in self.marks):
            return True
        found = self._pattern.match(text)
        return False if found is None else found[0]

    def _tail(self, text: str) -> int:
        at = max(0, len(text) - self._longest + 1)
        while (first := self._first.search(text, at)) is not None:
            at = first.start()
            rest = text[at:]
            if any(len(mark) > len(rest) and mark.startswith(rest) for mark in self.marks):
                return at
            at += 1
        return len(text)


@lru_cache(maxsize=256)
def finder_of(marks: tuple[str, ...]) -> MarkFinder:
    """The finder of these marks; kept, since few sets of marks are in use."""
    return MarkFinder(marks)


def has_symbol(text: str) -> bool:
    """Whether a special token is in the text."""
    return not text.isascii() and _symbol.search(text) is not None


def marks_of(*groups: Sequence[str]) -> tuple[str, ...]:
    """All marks of some groups, once each."""
    return tuple(dict.fromkeys(mark for group in groups for mark in group))
