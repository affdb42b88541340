"""What preparing a request needs of a grammar compiler. `samovar.grammar.compiler` has the real one."""

from __future__ import annotations

from typing import Protocol

from samovar.core.structured import StructuredOutputsParams
from samovar.text.lark import Lark


class GrammarSource(Protocol):
    """Turns wishes into grammars, and refuses what cannot be enforced. Safe to share between threads; may block."""

    def structured(self, params: StructuredOutputsParams) -> str:
        """The grammar of a whole answer. Raises `ValidationError` naming what cannot be enforced."""
        ...

    def json_expression(self, params: StructuredOutputsParams, lark: Lark) -> str:
        """The same as an expression, for a document that holds more."""
        ...

    def lark(self, *, field: str = "structured_outputs") -> Lark:
        """A new document that knows the tokenizer's special tokens. `field` is where its schemas come from, for refusals."""
        ...

    def check(self, grammar: str) -> None:
        """Compile within the limits; raises `ValidationError` for a grammar that does not or takes too long."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...
