"""A small vocabulary with awkward tokens, and what can be asked of a grammar with it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np

from samovar.core.constraint import Constraint, ReasoningSpan
from samovar.grammar.matcher import Matchers, SequenceMatcher
from tests.text.byte_tokenizer import ByteTokenizer

SPECIALS = ("<eos>", "<end>", "<tool>", "</tool>", "<think>", "</think>")
PIECES = (
    b'{"', b'"}', b'": ', b'":', b'", "', b'","', b"},", b"}]", b"[]", b"{}", b": ", b", ", b",\n", b"  ", b"\n  ",
    b"    ", b"true", b"false", b"null", b"12", b"345", b"1.5", b"00", b"-1", b"e1", b"abc", b"ab", b" the", b"name",
    "é".encode(), b"\xc3", b"\xf0\x9f", b"\x98\x80", "ж".encode(), b'a"', b'"a', b'\\"', b"\\n", b"\\u", b">\n", b"</", b"\"}\n",
    b"ink>", b"ink>{", b"think", b" \n", b"2024-", b"-02", b"T1", b":00", b"Z\"", b"@a", b".com",
)  # fmt: skip


class Vocabulary(ByteTokenizer):
    """Bytes, pieces that cut across JSON's and UTF-8's borders, and special tokens that `encode` knows."""

    def __init__(self) -> None:
        super().__init__(PIECES, SPECIALS)

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            special = next((s for s in SPECIALS if parse_special and text.startswith(s, at)), None)
            if special is None:
                ids += text[at].encode()
                at += 1
            else:
                ids.append(self.special(special))
                at += len(special)
        return ids

    def special(self, text: str) -> int:
        return self.first_special + SPECIALS.index(text)


TOKENIZER = Vocabulary()
EOS, END = TOKENIZER.special("<eos>"), TOKENIZER.special("<end>")
PADDED = TOKENIZER.vocab_size + 41
"""Logits of the model, which has more than there are tokens."""


def make_matchers() -> Matchers:
    return Matchers(TOKENIZER, PADDED, [EOS, END])


MATCHERS = make_matchers()


def start(
    grammar: str | None, reasoning: ReasoningSpan | None = None, matchers: Matchers = MATCHERS
) -> SequenceMatcher:
    return matchers.start(Constraint(grammar=grammar, reasoning=reasoning))


def allowed(matcher: SequenceMatcher, matchers: Matchers = MATCHERS) -> set[int] | None:
    """The tokens a matcher allows; None if all."""
    row = np.full(matchers.words, 0x5A5A5A5A, dtype=np.int32)
    if not matcher.mask_into(row):
        assert (row == 0x5A5A5A5A).all()
        return None
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


def takes(matcher: SequenceMatcher, ids: Sequence[int]) -> bool:
    """Whether every token is allowed in its turn, and the end after them."""
    for token in ids:
        if matcher.error is not None or matcher.is_finished:
            return False
        matcher.advance(token)
    if matcher.error is not None:
        return False
    now = allowed(matcher)
    return matcher.error is None and (matcher.is_finished or now is None or EOS in now)


def accepts(grammar: str, text: str) -> bool:
    """Whether the grammar allows exactly this answer, spelled byte by byte; special tokens are read as such."""
    matcher = start(grammar)
    assert matcher.error is None, matcher.error
    return takes(matcher, TOKENIZER.encode(text))


def babble(matcher: SequenceMatcher, chance: random.Random, tokens: int) -> tuple[list[int], bool]:
    """An answer of a model that picks any allowed token, and whether it came to its end."""
    said: list[int] = []
    for _ in range(tokens):
        choices = allowed(matcher)
        assert matcher.error is None, matcher.error
        assert choices, "nothing is allowed"
        token = chance.choice(sorted(choices))
        matcher.advance(token)
        assert matcher.error is None, matcher.error
        if token in (EOS, END):
            return said, True
        said.append(token)
        if matcher.is_finished:
            return said, True
    return said, False


def text_of(ids: Sequence[int]) -> str:
    return b"".join(TOKENIZER.token_bytes(i) for i in ids).decode("utf-8")
