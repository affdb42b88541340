"""Matchers: what each sequence may say next, one bit a token. The engine's side of grammars and thinking budgets."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from samovar.core.constraint import Constraint, ReasoningSpan
from samovar.grammar.limits import PARSER_LIMITS
from samovar.grammar.plain_schemas import plain_grammar
from samovar.grammar.reasoning import EndMark, Phase, ReasoningTracker, bits_of
from samovar.grammar.tokens import Vocabulary, encoder_of, table_of, vocabulary_of
from samovar.grammar.xgrammar_matcher import XGrammarMatcher, XGrammars
from samovar.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer

KEPT_GRAMMARS = 32
KEPT_BYTES = 4 * 1024 * 1024
"""Of grammar text whose fresh matchers are kept, to be copied for the next sequence with the same grammar."""

KEPT_MARKS = 16

RESCUE_TOKENS = 256
"""Between two times that one sequence gets a fresh lexer."""


class Matchers:
    """Makes the matchers of an engine's sequences. One thread may make them while another one uses those it has.

    The vocabulary is read with the first constraint, and llguidance's table of it made with the first grammar. With
    `prefers_xgrammar`, xgrammar follows the grammars that `plain_grammar` can write for it, llguidance all others.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        prefers_xgrammar: bool = False,
    ) -> None:
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._tokenizer = tokenizer
        self._eos_token_ids = eos_token_ids
        self._prefers_xgrammar = prefers_xgrammar
        self._fresh: OrderedDict[str, LLMatcher | XGrammarMatcher] = OrderedDict()
        self._marks: OrderedDict[tuple[int, ...], EndMark] = OrderedDict()
        self._lock = threading.Lock()

    def start(self, constraint: Constraint) -> SequenceMatcher:
        """The matcher of a new sequence. A grammar that cannot be followed gives one with an `error`, never raises."""
        span = constraint.reasoning
        tracker = None if span is None else ReasoningTracker(span, self._end_mark(span))
        if span is not None and constraint.grammar is not None:
            self._end_mark(span).prepare()
            self.all_but_eos.flags.writeable = False  # made here, and not first within a step
        return SequenceMatcher(self, constraint.grammar, tracker)

    def fill(self, pairs: Sequence[tuple[SequenceMatcher, int]], mask: NDArray[np.int32]) -> list[bool]:
        """`mask_into` for many sequences, in parallel: row `i` of `mask` for each (matcher, i). False: left as it was."""
        ready = [(m.bare_grammar, row) for m, row in pairs]
        together = [(g, row) for g, row in ready if g is not None and not isinstance(g, XGrammarMatcher)]
        if len(together) < 2 or mask.shape[1] != self.words or not mask.flags.c_contiguous or self._is_padded:
            return [matcher.mask_into(mask[row]) for matcher, row in pairs]
        self._executor.unsafe_compute_mask_ptr(together, mask.ctypes.data, 4 * self.words, len(mask))
        written = []
        for (matcher, row), (grammar, _) in zip(pairs, ready):
            if grammar is None or isinstance(grammar, XGrammarMatcher) or grammar.is_error():
                written.append(matcher.mask_into(mask[row]))
            else:
                written.append(True)
        return written

    @property
    def words(self) -> int:
        """32-bit words in one row of a mask."""
        return (self.vocab_size + 31) // 32

    @cached_property
    def eos_only(self) -> NDArray[np.int32]:
        """A row that allows nothing but the end."""
        return bits_of(sorted(self.eos_ids), self.vocab_size)

    @cached_property
    def all_but_eos(self) -> NDArray[np.int32]:
        """A row that allows every token there is but the ends."""
        known = [i for i, token in enumerate(self.vocabulary.tokens[: self.vocab_size]) if token]
        return bits_of([i for i in known if i not in self.eos_ids], self.vocab_size)

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The tokens by id."""
        return vocabulary_of(self._tokenizer, self.vocab_size, self._eos_token_ids)

    def grammar_row(self, grammar: LLMatcher | XGrammarMatcher, row: NDArray[np.int32]) -> None:
        """What the grammar allows now. The matcher may be in its error state afterwards."""
        if row.flags.c_contiguous and not self._is_padded:
            _fill(grammar, row)
            return
        scratch = np.zeros((self.vocabulary.size + 31) // 32, dtype=np.int32)
        _fill(grammar, scratch)
        np.bitwise_and(scratch[: len(row)], self._every_id, out=row)

    @property
    def _is_padded(self) -> bool:
        """The table has one id more than the model: an end of sequence, for a model that has none."""
        return self.vocabulary.size != self.vocab_size

    @cached_property
    def _every_id(self) -> NDArray[np.int32]:
        return bits_of(range(self.vocab_size), self.vocab_size)

    @cached_property
    def _table(self) -> LLTokenizer:
        return table_of(self.vocabulary, encoder_of(self._tokenizer))

    @cached_property
    def _executor(self) -> LLExecutor:
        from llguidance import LLExecutor

        return LLExecutor()

    @cached_property
    def _xgrammars(self) -> XGrammars:
        return XGrammars(self.vocabulary)

    def copy(self, text: str) -> LLMatcher | XGrammarMatcher:
        """A matcher at the beginning of a grammar. All copies share one lexer, whose states each of them adds to."""
        with self._lock:
            kept = self._fresh.pop(text, None)
        if kept is None:
            plain = plain_grammar(text) if self._prefers_xgrammar else None
            kept = self.build(text) if plain is None else self._xgrammars.matcher(plain)
        with self._lock:
            self._fresh[text] = kept
            while len(self._fresh) > KEPT_GRAMMARS or sum(map(len, self._fresh)) > KEPT_BYTES:
                self._fresh.popitem(last=False)
        return kept.deep_copy()

    def build(self, text: str) -> LLMatcher:
        """A matcher of llguidance with a lexer of its own."""
        from llguidance import LLMatcher, LLParserLimits

        return LLMatcher(self._table, text, log_level=0, limits=LLParserLimits(**PARSER_LIMITS))

    def forget(self, text: str) -> None:
        """Keep a grammar's lexer for no further sequences: it is full."""
        with self._lock:
            self._fresh.pop(text, None)

    def _end_mark(self, span: ReasoningSpan) -> EndMark:
        key = tuple(span.end_ids)
        mark = self._marks.pop(key, None) or EndMark(span.end_ids, self.vocabulary)
        self._marks[key] = mark
        if len(self._marks) > KEPT_MARKS:
            self._marks.popitem(last=False)
        return mark


class SequenceMatcher:
    """What one sequence may say next. Feed it every sampled token, in order; it survives preemption as it is."""

    def __init__(self, matchers: Matchers, text: str | None, tracker: ReasoningTracker | None) -> None:
        self._matchers = matchers
        self._text = text
        self._grammar: LLMatcher | XGrammarMatcher | None = None if text is None else matchers.copy(text)
        self._tracker = tracker
        self._said: list[int] = []
        """The tokens the grammar has taken."""
        self._next_rescue = 0
        self._follows = True
        """The grammar allows all that was said so far; it may not while the model may be about to think."""
        self._failure: str | None = None
        if self._grammar is not None and self._grammar.is_error():
            self._fail(self._grammar)

    @property
    def error(self) -> str | None:
        """Why the sequence cannot go on; None while all is well."""
        return self._failure

    @property
    def is_finished(self) -> bool:
        """Nothing more can follow: the sequence ends as if the model had stopped by itself."""
        grammar = self.bare_grammar
        return grammar is not None and grammar.is_stopped() and not grammar.is_error()

    @property
    def is_free(self) -> bool:
        """Everything is allowed now, so that `mask_into` would leave the row alone."""
        return self._grammar is None and self._failure is None and self._phase is not Phase.CLOSING

    @property
    def bare_grammar(self) -> LLMatcher | XGrammarMatcher | None:
        """The grammar, where it alone decides about the next token."""
        return self._grammar if self._failure is None and self._phase is Phase.OVER else None

    @property
    def _phase(self) -> Phase:
        return Phase.OVER if self._tracker is None else self._tracker.phase

    def mask_into(self, row: NDArray[np.int32]) -> bool:
        """Write the allowed tokens into `row`: bit `i % 32` of word `i // 32` for token i.

        False: everything is allowed, and the row is as it was. After an error only the end of the sequence is allowed.
        """
        if self.is_free:
            return False
        tracker, phase = self._tracker, self._phase
        if self._failure is not None:
            row[:] = self._matchers.eos_only
        elif tracker is None or phase is Phase.OVER:
            self._write_grammar(row)
        elif phase is Phase.CLOSING:
            row[:] = 0
            _allow(row, tracker.forced_id)
        elif phase is Phase.THINKING:
            row[:] = self._matchers.all_but_eos
            splitting = tracker.splitting()
            if splitting is not None:
                row &= ~splitting[: len(row)]
        else:
            row[:] = 0
            if self._follows:
                self._write_grammar(row)
            _allow(row, tracker.opening_id)
        return True

    def advance(self, token_id: int) -> None:
        """Take the token that was sampled. One that was not allowed is an error, and the error stays."""
        tracker = self._tracker
        if self._failure is not None:
            return
        if tracker is None or tracker.phase is Phase.OVER:
            self._consume(token_id)
            return
        was_opening = tracker.phase is Phase.OPENING
        tracker.advance(token_id)
        if not was_opening:
            return
        if self._phase is Phase.OVER:
            self._consume(token_id)
        elif self._phase is Phase.OPENING:
            # The opening mark's first tokens may as well be the answer's: both ways stay open until they part.
            if self._grammar is not None and self._follows:
                self._follows = self._grammar.try_consume_tokens([token_id]) == 1
                self._said.append(token_id)
        elif self._grammar is not None:
            self._grammar.reset()
            self._said.clear()
            self._follows = True

    def _consume(self, token_id: int) -> None:
        grammar = self._grammar
        if grammar is None or (grammar.is_stopped() and token_id in self._matchers.eos_ids):
            return
        if not self._follows:
            self._fail(grammar)
        elif not grammar.consume_token(token_id):
            grammar = self._rescue() or grammar
            if grammar.is_error() or not grammar.consume_token(token_id):
                self._fail(grammar)
        self._said.append(token_id)

    def _write_grammar(self, row: NDArray[np.int32]) -> None:
        grammar = self._grammar
        if grammar is None:
            return
        self._matchers.grammar_row(grammar, row)
        if grammar.is_error() and (rescued := self._rescue()) is not None:
            grammar = rescued
            self._matchers.grammar_row(grammar, row)
        if grammar.is_error():
            self._fail(grammar)
            row[:] = self._matchers.eos_only

    def _rescue(self) -> LLMatcher | None:
        """Begin again with an empty lexer, whose states others cannot have used up, and take in what was said.

        It is llguidance's, which so has the last word about a token that xgrammar did not take.
        """
        if self._text is None or len(self._said) < self._next_rescue:
            return None
        self._matchers.forget(self._text)
        fresh = self._matchers.build(self._text)
        if not fresh.consume_tokens(self._said):
            return None
        self._grammar = fresh
        self._next_rescue = len(self._said) + RESCUE_TOKENS
        return fresh

    def _fail(self, grammar: LLMatcher | XGrammarMatcher) -> None:
        reason = grammar.get_error().strip().splitlines() or ["a token that was not allowed"]
        self._failure = f"the grammar cannot be followed any further: {reason[0][:300]}"


def _fill(grammar: LLMatcher | XGrammarMatcher, row: NDArray[np.int32]) -> None:
    if isinstance(grammar, XGrammarMatcher):
        grammar.fill(row)
    else:
        grammar.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)


def _allow(row: NDArray[np.int32], token_id: int) -> None:
    row.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))
