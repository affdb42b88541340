"""The stretch of thinking before a constrained answer: where it begins, where it ends, and how long it may be."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from samovar.core.constraint import ReasoningSpan
from samovar.grammar.tokens import Vocabulary

SPECIAL = 256
"""Added to the id of a special token, it is a symbol that no byte is."""


class Phase(Enum):
    """Where a sequence stands."""

    OPENING = "opening"
    """The model may still begin to think: nothing was said yet, or only the first tokens of the opening mark."""
    THINKING = "thinking"
    CLOSING = "closing"
    """The budget is spent; the end mark is being forced."""
    OVER = "over"


class EndMark:
    """Finds the mark that ends thinking in a stream of tokens.

    Special tokens of the mark match by id. The rest of it matches as text, however the model spells it.
    """

    def __init__(self, ids: Sequence[int], vocabulary: Vocabulary) -> None:
        self.ids = list(ids)
        self._tokens = vocabulary.tokens
        self._special = frozenset(vocabulary.special_ids)
        self._symbols = [symbol for token_id in ids for symbol in self._symbols_of(token_id)]
        self._falls = _failure_table(self._symbols)
        self._splits: list[NDArray[np.int32] | None] | None = None

    def step(self, state: int, token_id: int) -> tuple[int, bool]:
        """How much of the mark has been seen -> the same after one more token, and whether the mark is complete."""
        return self._follow(state, self._symbols_of(token_id))

    def prepare(self) -> None:
        """Find the tokens that end the mark before they end themselves, which takes some milliseconds."""
        if self._splits is not None:
            return
        last = self._symbols[-1]
        suspects: list[int] = []
        if last < SPECIAL:
            byte = bytes([last])
            suspects = [i for i, t in enumerate(self._tokens) if byte in t[:-1] and i not in self._special]
        self._splits = []
        for state in range(len(self._symbols)):
            bad = [i for i in suspects if self._follow(state, self._tokens[i][:-1])[1]]
            self._splits.append(bits_of(bad, len(self._tokens)) if bad else None)

    def splitting(self, state: int) -> NDArray[np.int32] | None:
        """A bit for every token that would complete the mark before the token's own end; None where there is none.

        What follows the mark is for the grammar to say, so such tokens must not be sampled.
        """
        self.prepare()
        return None if self._splits is None else self._splits[state]

    def _symbols_of(self, token_id: int) -> Sequence[int]:
        """Bytes, or one number above them for a special token."""
        if token_id in self._special:
            return (SPECIAL + token_id,)
        return self._tokens[token_id] if token_id < len(self._tokens) else b""

    def _follow(self, state: int, symbols: Sequence[int]) -> tuple[int, bool]:
        for symbol in symbols:
            while state and self._symbols[state] != symbol:
                state = self._falls[state - 1]
            state = state + 1 if self._symbols[state] == symbol else 0
            if state == len(self._symbols):
                return 0, True
        return state, False


class ReasoningTracker:
    """Follows one sequence through its thinking."""

    def __init__(self, span: ReasoningSpan, end: EndMark) -> None:
        self._span = span
        self._end = end
        self._seen = 0
        self._thought = 0
        self._forced = 0
        self._opened = 0
        if not span.is_open:
            self.phase = Phase.OPENING if span.start_ids else Phase.OVER
        else:
            self.phase = Phase.THINKING
            self._count(0)

    @property
    def opening_id(self) -> int:
        """The next token of the opening mark, while it is being written or may be."""
        return self._span.start_ids[self._opened]

    @property
    def forced_id(self) -> int:
        """The next token of the end mark, once the budget is spent."""
        return self._end.ids[self._forced]

    def splitting(self) -> NDArray[np.int32] | None:
        """A bit for every token that would end the thinking in its own middle."""
        return self._end.splitting(self._seen)

    def advance(self, token_id: int) -> None:
        """Take the next token of the sequence."""
        if self.phase is Phase.OPENING:
            if token_id != self.opening_id:
                self.phase = Phase.OVER
                return
            self._opened += 1
            if self._opened == len(self._span.start_ids):
                self.phase = Phase.THINKING
                self._count(0)
        elif self.phase is Phase.CLOSING:
            self._forced += 1
            if self._forced == len(self._end.ids):
                self.phase = Phase.OVER
        elif self.phase is Phase.THINKING:
            self._seen, is_over = self._end.step(self._seen, token_id)
            if is_over:
                self.phase = Phase.OVER
            else:
                self._count(1)

    def _count(self, tokens: int) -> None:
        self._thought += tokens
        if self._span.budget is not None and self._thought >= self._span.budget:
            self.phase = Phase.CLOSING


def bits_of(ids: Sequence[int], vocab_size: int) -> NDArray[np.int32]:
    """A mask with these tokens allowed, one bit a token."""
    words = np.zeros((vocab_size + 31) // 32, dtype=np.uint32)
    chosen = np.asarray(ids, dtype=np.int64)
    np.bitwise_or.at(words, chosen >> 5, np.uint32(1) << (chosen & 31).astype(np.uint32))
    return words.view(np.int32)


def _failure_table(symbols: Sequence[int]) -> list[int]:
    """For every beginning of `symbols`, the length of its longest end that is also a beginning (Knuth, Morris, Pratt)."""
    table = [0] * len(symbols)
    length = 0
    for at in range(1, len(symbols)):
        while length and symbols[at] != symbols[length]:
            length = table[length - 1]
        if symbols[at] == symbols[length]:
            length += 1
        table[at] = length
    return table
