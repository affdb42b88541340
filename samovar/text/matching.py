"""Finding any of many fixed texts: one regular expression built as a trie, and the proper beginnings of the texts."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

NEVER = re.compile(r"(?!)")


def any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the leftmost, then longest, of `texts`, whatever their number."""
    root: dict[str, Any] = {}
    for text in filter(None, texts):
        node = root
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return re.compile(_source(root), re.DOTALL) if root else NEVER


def _source(node: dict[str, Any]) -> str:
    """The expression of one trie node; runs of single children are written in a loop, so that depth is no limit."""
    out: list[str] = []
    while True:
        branches = [(char, child) for char, child in node.items() if char]
        if "" in node and branches:
            inner = "|".join(re.escape(char) + _source(child) for char, child in branches)
            return "".join([*out, f"(?:{inner})?"])
        if len(branches) != 1:
            inner = "|".join(re.escape(char) + _source(child) for char, child in branches)
            return "".join([*out, f"(?:{inner})" if branches else ""])
        out.append(re.escape(branches[0][0]))
        node = branches[0][1]


def outside(
    pattern: re.Pattern[str], text: str, literal: Sequence[tuple[int, int]]
) -> Iterator[tuple[re.Match[str], bool]]:
    """Matches of `pattern`, each with whether it is meant: it touches none of the `literal` (start, end) stretches.

    A match that is not meant hides only its first character: one that begins inside it is found too.
    """
    spans = sorted(literal)
    at = search = 0
    while match := pattern.search(text, search):
        start, end = match.span()
        while at < len(spans) and spans[at][1] <= start:
            at += 1
        meant = at == len(spans) or spans[at][0] >= end
        search = end if meant else start + 1
        yield match, meant


def beginnings(texts: Iterable[str]) -> frozenset[str]:
    """Every proper, non-empty beginning of every text."""
    return frozenset(text[:n] for text in texts for n in range(1, len(text)))
