"""XGrammars: xgrammar as the second backend, behind the few methods of llguidance's matchers that are used here."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from samovar.grammar.reasoning import bits_of
from samovar.grammar.tokens import Vocabulary

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

NEVER = b"\xff"
"""No part of any UTF-8 text, and so of no document."""

logger = logging.getLogger(__name__)


class XGrammars:
    """Compiles EBNF for one vocabulary. Loads xgrammar, which brings torch and takes seconds: never on a step's thread."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        special = set(vocabulary.special_ids)
        # Ids without bytes would be allowed inside of strings, and special ones as their text.
        tokens = [NEVER if i in special else token or NEVER for i, token in enumerate(vocabulary.tokens)]
        table = xgrammar.TokenizerInfo(tokens, vocab_size=vocabulary.size, stop_token_ids=vocabulary.eos_ids)
        self._compiler = xgrammar.GrammarCompiler(table, max_threads=1, cache_enabled=False)
        self._ends = bits_of(vocabulary.eos_ids, vocabulary.size)
        self._every = bits_of(range(vocabulary.size), vocabulary.size)

    def matcher(self, ebnf: str) -> XGrammarMatcher:
        """A matcher at the beginning of a grammar."""
        started = time.monotonic()
        compiled = self._compiler.compile_grammar(ebnf)
        logger.debug("xgrammar compiled a grammar in %.3f s", time.monotonic() - started)
        return XGrammarMatcher(compiled, self._ends, self._every)


class XGrammarMatcher:
    """One sequence in a compiled grammar. It has no error state: what is not allowed is not taken."""

    def __init__(self, compiled: CompiledGrammar, ends: NDArray[np.int32], every: NDArray[np.int32]) -> None:
        from xgrammar import GrammarMatcher

        self._compiled = compiled
        self._ends = ends
        self._every = every
        self._matcher = GrammarMatcher(compiled)

    def deep_copy(self) -> XGrammarMatcher:
        """A fresh matcher of the same grammar."""
        return XGrammarMatcher(self._compiled, self._ends, self._every)

    def fill(self, row: NDArray[np.int32]) -> None:
        """Write the tokens that are allowed now into a whole row."""
        if self._matcher.is_terminated():
            row[:] = self._ends
        elif self._matcher.fill_next_token_bitmask(row[np.newaxis, :]):
            row &= self._every  # ids that do not exist fill up the last word
        else:
            row[:] = self._every

    def consume_token(self, token_id: int) -> bool:
        """Take one token, if it is allowed."""
        return not self._matcher.is_terminated() and self._matcher.accept_token(token_id)

    def try_consume_tokens(self, token_ids: Sequence[int]) -> int:
        """Take tokens until one is not allowed; how many were."""
        for count, token_id in enumerate(token_ids):
            if not self.consume_token(token_id):
                return count
        return len(token_ids)

    def is_stopped(self) -> bool:
        """Nothing but the end can follow."""
        if self._matcher.is_terminated():
            return True
        if not self._matcher.is_completed():
            return False
        row = np.zeros_like(self._ends)
        self.fill(row)
        return bool((row == self._ends).all())

    def reset(self) -> None:
        """Back to the beginning."""
        self._matcher.reset()

    def is_error(self) -> bool:
        """Never: see above."""
        return False

    def get_error(self) -> str:
        """What to say about a token that was not taken."""
        return "a token that was not allowed"
