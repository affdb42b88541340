"""One grammar compiler, with its side processes, for all tests of grammars."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from samovar.grammar.compiler import GrammarCompiler
from tests.grammar.matching import END, EOS, PADDED, TOKENIZER


@pytest.fixture(scope="session")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER, PADDED, [EOS, END])
    yield made
    made.close()
