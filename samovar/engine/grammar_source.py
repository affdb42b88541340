"""LazyGrammar: the grammar compiler of a model, made with the first request that needs one. Torch-free."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

from samovar.config.groups import ServerConfig
from samovar.core.structured import StructuredOutputsParams
from samovar.text.grammar_source import GrammarSource
from samovar.text.lark import Lark
from samovar.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from samovar.grammar.compiler import GrammarCompiler


class LazyGrammar:
    """A `GrammarSource`. Most servers never see a constrained request, and need not load what enforces one."""

    def __init__(
        self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int], server: ServerConfig
    ) -> None:
        self._tokenizer, self._vocab_size, self._eos_token_ids = tokenizer, vocab_size, list(eos_token_ids)
        self._server = server
        self._lock = threading.Lock()
        self._made: GrammarCompiler | None = None

    def close(self) -> None:
        """End its side processes, if there are any."""
        with self._lock:
            if self._made is not None:
                self._made.close()

    def structured(self, params: StructuredOutputsParams) -> str:
        """See `GrammarSource`."""
        return self._source().structured(params)

    def json_expression(self, params: StructuredOutputsParams, lark: Lark) -> str:
        """See `GrammarSource`."""
        return self._source().json_expression(params, lark)

    def lark(self, *, field: str = "structured_outputs") -> Lark:
        """See `GrammarSource`."""
        return self._source().lark(field=field)

    def check(self, grammar: str) -> None:
        """See `GrammarSource`."""
        self._source().check(grammar)

    def _source(self) -> GrammarSource:
        with self._lock:
            if self._made is None:
                from samovar.grammar.compiler import GrammarCompiler
                from samovar.grammar.limits import GrammarLimits

                limits = GrammarLimits(
                    source_bytes=self._server.structured_outputs_max_bytes,
                    deadline_seconds=self._server.structured_outputs_timeout,
                    cache_bytes=self._server.structured_outputs_cache_bytes,
                )
                self._made = GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids, limits)
            return self._made
