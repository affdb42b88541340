"""Random texts of a format's grammar, sampled token by token under llguidance's masks, and what is read from them."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from samovar.core.tools import ToolCallDelta, ToolDefinition
from samovar.grammar.tokens import table_of, vocabulary_of
from samovar.text.answer import AnswerPlan
from samovar.text.formats.base import ReasoningFormat, Said, Thought, ToolFormat
from samovar.text.lark import Lark
from samovar.text.marks import alphabet_of
from samovar.text.regions import RegionParser
from tests.text.byte_tokenizer import ByteTokenizer

ENDS = (
    "\n</parameter>\n",
    "</parameter>\n",
    "</parameter>",
    "</arg_value>",
    "</｜DSML｜parameter>",
    "</",
    '"',
    "}",
    "]",
    ">",
    ',"',
)
PIECES = (
    *ENDS,
    *("</function>\n", "</invoke>\n", '",', "},", '"}', "true", "null", "call:", "<|", "<"),
    *("</tool_call>", "</parameter", "héllo wörld", "日本", "{", "[", "12", " ", "\n", "\\"),
)
"""Tokens beside single bytes, so that random walks come to their end, and meet what looks like a mark."""

MAX_TOKENS = 600


class Walks:
    """Walks through the grammar of some tools. `marks` are special tokens of the tokenizer, or ordinary ones."""

    def __init__(
        self,
        format: ToolFormat,
        tools: Sequence[ToolDefinition],
        marks: Sequence[str],
        *,
        are_special: bool = True,
        parallel: bool = True,
        is_free: bool = False,
    ) -> None:
        self.format, self.tools = format, tools
        self.tokenizer, self._table = tokenizer_of(tuple(marks), are_special)
        ids = {self.tokenizer.token_text(i): i for i in range(self.tokenizer.first_special, self.tokenizer.vocab_size)}
        self._special = {text: i for text, i in ids.items() if text != "<eos>"}
        lark = Lark(self._special.get)
        expression = format.grammar(lark, tools, parallel)
        if is_free and format.whole is not None:
            expression = format.whole.free(lark, expression)
        elif is_free:
            expression = lark.free_then(format.opens, expression)
        self.grammar = lark.document(expression)
        self._matcher = LLMatcher(self._table, LLMatcher.grammar_from_lark(self.grammar), log_level=0)
        ends = [piece.encode() for piece in (*ENDS, *marks)]
        self._ends = {i for i in range(self.tokenizer.vocab_size) if self.tokenizer.token_bytes(i) in ends}
        assert not self._matcher.is_error(), self._matcher.get_error() + "\n" + self.grammar

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text, with its marks as the tokens they are."""
        ids: list[int] = []
        for part in re.split("(" + "|".join(map(re.escape, self._special)) + ")", text) if self._special else [text]:
            ids += [self._special[part]] if part in self._special else part.encode()
        return ids

    def accepts(self, text: str) -> bool:
        """Whether the grammar has this text, as a whole."""
        ids = self.tokens(text)
        matcher = self._matcher.deep_copy()
        return matcher.try_consume_tokens(list(ids)) == len(ids) and matcher.is_accepting()

    def walk(self, seed: int) -> list[int] | None:
        """The tokens of one text; None if it does not end within `MAX_TOKENS`."""
        rng, matcher, ids = random.Random(seed), self._matcher.deep_copy(), []
        eos, first_piece = self.tokenizer.eos_token_id, 256
        for count in range(MAX_TOKENS):
            if matcher.is_stopped():
                return ids
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            if eos in allowed and (rng.random() < 0.5 or len(allowed) == 1):
                return ids
            allowed = allowed[allowed != eos]
            pieces = allowed[allowed >= first_piece]
            ends = [i for i in pieces if i in self._ends]
            if ends and count > 60:
                pieces = np.array(ends)
            plain = allowed[(allowed >= 32) & (allowed < 127)]
            choice = pieces if len(pieces) and rng.random() < 0.3 + count / 200 else plain if len(plain) else allowed
            token = int(rng.choice(list(choice)))
            assert matcher.consume_token(token), (matcher.get_error(), token)
            ids.append(token)
        return None

    def text(self, ids: Sequence[int]) -> str:
        """The text of tokens, marks spelled out."""
        return b"".join(map(self.tokenizer.token_bytes, ids)).decode()

    def read(self, ids: Sequence[int], reasoning: ReasoningFormat | None = None) -> tuple[list[tuple[str, str]], str]:
        """The calls (name, arguments) and the content of these tokens, fed one by one."""
        plan = AnswerPlan(tools=self.format, reasoning=reasoning, definitions={tool.name: tool for tool in self.tools})
        marks = (*self.format.opens, *self.format.closes, *self.format.inner)
        whole = self.format.whole
        parser = RegionParser(plan, alphabet_of(self.tokenizer, marks if whole is None else whole.marks))
        news, pending = [], b""
        for i in ids:
            if self.tokenizer.is_special(i):
                news += parser.feed_mark(self.tokenizer.token_text(i))
                continue
            pending += self.tokenizer.token_bytes(i)
            try:
                news += parser.feed(pending.decode())
                pending = b""
            except UnicodeDecodeError:
                continue
        assert not pending
        news += parser.finish(truncated=False)
        calls: list[tuple[str, list[str]]] = []
        for item in news:
            if isinstance(item, ToolCallDelta):
                if item.name is not None:
                    calls.append((item.name, []))
                calls[item.index][1].append(item.arguments)
        said = "".join(item.text for item in news if isinstance(item, Said | Thought))
        return [(name, "".join(parts)) for name, parts in calls], said


@lru_cache(maxsize=32)
def tokenizer_of(marks: tuple[str, ...], are_special: bool) -> tuple[ByteTokenizer, LLTokenizer]:
    """A tokenizer with these marks, and llguidance's table of it."""
    pieces = [*PIECES, *(() if are_special else marks)]
    tokenizer = ByteTokenizer([piece.encode() for piece in pieces], ("<eos>", *(marks if are_special else ())))
    return tokenizer, table_of(vocabulary_of(tokenizer, tokenizer.vocab_size, [tokenizer.first_special]))


def check(walks: Walks, seeds: range) -> int:
    """Every walk is read as calls whose arguments their tools allow. Returns how many came to their end."""
    import jsonschema

    ended = 0
    for seed in seeds:
        ids = walks.walk(seed)
        if ids is None:
            continue
        ended += 1
        text = walks.text(ids)
        calls, said = walks.read(ids)
        assert calls and not said.strip(), (text, calls, said)
        by_name: dict[str, Any] = {tool.name: tool.parameters for tool in walks.tools}
        for name, arguments in calls:
            value = json.loads(arguments)
            assert isinstance(value, dict), text
            try:
                jsonschema.validate(value, by_name[name])
            except jsonschema.ValidationError as error:
                raise AssertionError(f"{text!r} was read as {arguments}: {error.message}") from None
    return ended
