"""GrammarEnforcer: the scheduler's `Enforcer` over `samovar.grammar`: matchers made on a thread, masks of a step at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol, cast

import numpy as np
from numpy.typing import NDArray

from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig
from samovar.core.constraint import Constraint
from samovar.core.step import TokenMasks
from samovar.schedule.live import TokenMatcher
from samovar.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class Matchers(Protocol):
    """What makes them, and asks many at once. `samovar.grammar.matcher` has the real one."""

    @property
    def words(self) -> int:
        """32-bit words in one row of a mask."""
        ...

    def start(self, constraint: Constraint) -> TokenMatcher: ...

    def fill(self, pairs: list[tuple[TokenMatcher, int]], mask: NDArray[np.int32]) -> list[bool]:
        """Write the allowed tokens of each (matcher, row) into that row; False where everything is allowed."""
        ...


class GrammarEnforcer:
    """`make` is called with the first constrained request, on the thread: it may load a tokenizer, and llguidance.

    Matchers are made one after the other. Those that exist already are asked on the engine's thread, at any time.
    """

    def __init__(self, make: Callable[[], Matchers]) -> None:
        self._make = make
        self._matchers: Matchers | None = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="samovar-grammar")

    def begin(self, constraint: Constraint) -> Future[TokenMatcher]:
        """See `Enforcer`."""
        return self._thread.submit(self._start, constraint)

    def masks(self, rows: list[tuple[int, TokenMatcher]]) -> TokenMasks | None:
        """See `Enforcer`."""
        matchers = self._matchers
        assert matchers is not None, "there is no matcher yet"
        words = np.empty((len(rows), matchers.words), np.int32)
        is_written = matchers.fill([(matcher, row) for row, (_, matcher) in enumerate(rows)], words)
        if all(is_written):
            return TokenMasks([slot for slot, _ in rows], words)
        kept = [row for row, written in enumerate(is_written) if written]
        return TokenMasks([rows[row][0] for row in kept], words[kept]) if kept else None

    def close(self) -> None:
        """End the thread; matchers that nobody waits for any more are not made."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self, constraint: Constraint) -> TokenMatcher:
        if self._matchers is None:
            self._matchers = self._make()
        return self._matchers.start(constraint)


def backend_text(config: EngineConfig) -> str:
    """What follows the grammars of requests, in words."""
    if config.device.structured_outputs_backend == "xgrammar":
        return "structured outputs: xgrammar for plain JSON Schemas, llguidance for all else"
    return "structured outputs: llguidance"


def grammar_enforcer(
    config: EngineConfig, description: ModelDescription, vocab_size: int, tokenizer: Tokenizer | None = None
) -> GrammarEnforcer | None:
    """The enforcer of a model; None for one that takes and gives token ids only. The `tokenizer` is loaded if not given."""
    if config.model.skip_tokenizer_init:
        return None
    if config.device.structured_outputs_backend == "xgrammar":  # the usual one is named among the decisions
        logger.info("%s", backend_text(config))

    def make() -> Matchers:
        from samovar.engine.door import load_tokenizer_of
        from samovar.grammar.matcher import Matchers as GrammarMatchers
        from samovar.text.prepare import end_token_ids

        chosen = load_tokenizer_of(config, description) if tokenizer is None else tokenizer
        ends = end_token_ids(description, chosen)
        prefers_xgrammar = config.device.structured_outputs_backend == "xgrammar"
        return cast(Matchers, GrammarMatchers(chosen, vocab_size, ends, prefers_xgrammar=prefers_xgrammar))

    return GrammarEnforcer(make)
