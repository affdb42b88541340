"""A model's vocabulary as llguidance takes it, from our own tokenizer's bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from samovar.text.tokenizer import SpanTokenizer, Tokenizer

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_MARK = re.compile(r"<[^\s<>]+>|\[[^\s\[\]]+\]")

Encode: TypeAlias = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The bytes of every id of a model's logits; empty where no text belongs to an id, which is then never allowed."""

    tokens: list[bytes]
    special_ids: list[int]
    """Tokens that no text of a grammar matches, only their ids do: control tokens, and added tokens that are marks."""
    eos_ids: list[int]

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return len(self.tokens)


def vocabulary_of(tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> Vocabulary:
    """The vocabulary of a model with `vocab_size` logits. The tokenizer may know fewer tokens, or more."""
    known = min(vocab_size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(i) for i in range(known)]
    eos_ids = list(dict.fromkeys(i for i in eos_token_ids if 0 <= i < vocab_size))
    special = {i for i in range(known) if tokenizer.is_special(i)} | set(eos_ids) | _mark_ids(tokenizer, known)
    tokens += [b""] * (vocab_size - known)
    if not eos_ids:  # llguidance needs one; beyond the model's ids it is never sampled
        eos_ids = [vocab_size]
        special.add(vocab_size)
        tokens.append(b"")
    for i in special:
        tokens[i] = tokens[i] or b"<special %d>" % i
    return Vocabulary(tokens, sorted(special), eos_ids)


def _mark_ids(tokenizer: Tokenizer, known: int) -> set[int]:
    """Added tokens in angles or square brackets, such as `<tool_call>`: the parsers of answers read them by id, too."""
    found: set[int] = set()
    if isinstance(tokenizer, SpanTokenizer):
        for text in tokenizer.added_tokens:
            if _MARK.fullmatch(text):
                ids = tokenizer.encode(text, add_special_tokens=False)
                found.update(ids if len(ids) == 1 and ids[0] < known else ())
    return found


class _Wrapped:
    """The attributes llguidance reads when it builds its table, and the tokenization of text that a grammar forces."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, encode: Encode | None) -> None:
        self.eos_token_id = vocabulary.eos_ids[0]
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        special = set(vocabulary.special_ids)
        self._encode = encode
        self._ids = {token: i for i, token in enumerate(vocabulary.tokens) if token and i not in special}
        self._longest = max(map(len, self._ids), default=1)

    def __call__(self, text: str) -> list[int]:
        """Ids whose bytes are exactly the text's: the tokenizer's own choice, unless it adds or drops a blank."""
        wanted = text.encode("utf-8", "replace")
        if self._encode is not None:
            ids = self._encode(text)
            if b"".join(self.tokens[i] for i in ids if i < len(self.tokens)) == wanted:
                return ids
        ids, at = [], 0
        while at < len(wanted):
            for length in range(min(self._longest, len(wanted) - at), 0, -1):
                token = self._ids.get(wanted[at : at + length])
                if token is not None:
                    ids.append(token)
                    at += length
                    break
            else:
                return ids
        return ids


def table_of(vocabulary: Vocabulary, encode: Encode | None = None) -> LLTokenizer:
    """llguidance's table of the vocabulary: takes a second for 150,000 tokens. Text that can only continue in one way
    is then spelled as `encode` spells it."""
    from llguidance import LLTokenizer
    from llguidance._tokenizer import TokenizerWrapper

    wrapped = TokenizerWrapper(_Wrapped(vocabulary, encode))
    return LLTokenizer(wrapped, eos_token=vocabulary.eos_ids)


def encoder_of(tokenizer: Tokenizer) -> Encode:
    """How the tokenizer spells a text in the middle of another one."""
    return partial(tokenizer.encode, add_special_tokens=False, parse_special=False)
