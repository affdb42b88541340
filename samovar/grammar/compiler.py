"""GrammarCompiler: what clients want an answer to look like -> a grammar that was seen to compile, or a refusal."""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from samovar.core.structured import StructuredOutputsParams
from samovar.errors import ValidationError
from samovar.grammar.client_grammars import checked_lark, is_lark
from samovar.grammar.json_source import JsonStyle, client_whitespace, enforced_schema
from samovar.grammar.limits import GrammarLimits
from samovar.grammar.regex_rules import translate
from samovar.grammar.side_main import Task, Verdict
from samovar.grammar.side_process import SidePool
from samovar.grammar.structural import MORE_DEPTH, StructuralTags
from samovar.grammar.tokens import Vocabulary, vocabulary_of
from samovar.text.lark import Lark
from samovar.text.tokenizer import Tokenizer

FIELD = "structured_outputs"
_OURS = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: |\. Enable '\w+' option .*$")
"""Of the compiler's words, what is about the grammar made here and not about what the client sent."""
_REWORDED = {
    "circular references with sibling keys": "a $ref that leads back to where it is cannot be enforced beside other keywords",
    "Unable to determine if regex is empty": "a pattern with all that is said about the same string is too complex",
}
"""Beginnings of what the compiler says in words of its own -> the same in the words of clients."""
VERDICT_BYTES = 200
"""What one kept verdict costs beside its message."""


class GrammarCompiler:
    """Makes grammars, and compiles them aside. Safe to share between threads; its methods may take seconds."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: GrammarLimits | None = None,
    ) -> None:
        self.limits = limits or GrammarLimits()
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._pool = SidePool(lambda: self._vocabulary, self.limits)
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()
        self._verdict_bytes = 0
        self._lock = threading.Lock()

    def lark(self, params: StructuredOutputsParams | None = None, *, field: str = "tools") -> Lark:
        """A document that knows the tokenizer's special tokens, and enforces or refuses JSON Schemas.

        JSON is written as `params` want it. `field` names the schemas' origin in errors.
        """
        style = JsonStyle() if params is None else self._style(params)
        more = MORE_DEPTH if params is not None and params.kind == "structural_tag" else 0

        def source(schema: Mapping[str, Any] | bool | None) -> Mapping[str, Any]:
            wanted = {"type": "object"} if schema is None else schema
            return enforced_schema(wanted, self.limits, style, field=field, more_depth=more)

        return Lark(self._special_ids.get, schema_source=source)

    def structured(self, params: StructuredOutputsParams) -> str:
        """The grammar of a whole answer. Raises `ValidationError` naming the keyword that cannot be enforced."""
        if params.kind == "grammar":
            return self._client_grammar(params.grammar or "")
        lark = self.lark(params, field=f"{FIELD}.{params.kind}")
        return lark.document(self.json_expression(params, lark))

    def json_expression(self, params: StructuredOutputsParams, lark: Lark) -> str:
        """The same as an expression inside a document that holds more. Raises `ValidationError`."""
        field = f"{FIELD}.{params.kind}"
        if params.kind == "regex":
            return lark.regex(self._pattern(str(params.regex), field))
        if params.kind == "choice":
            return self._choice(params.choice or [], lark, field)
        if params.kind == "structural_tag":
            tags = StructuralTags(lark, self.limits, field=field, pattern=lambda p: self._pattern(p, field))
            return tags.expression(params.structural_tag)
        if params.kind == "grammar":
            message = f"{field} describes a whole answer and cannot be combined with tools"
            raise ValidationError(message, parameter=FIELD, value=None)
        schema: Any = {"type": "object"} if params.kind == "json_object" else params.json
        written = Lark(
            self._special_ids.get,
            schema_source=lambda s: enforced_schema(s, self.limits, self._style(params), field=field),
        )
        return written.json(schema)

    def check(self, grammar: str) -> None:
        """Compile in a side process, within the limits. Raises `ValidationError`; verdicts are kept."""
        size = len(grammar.encode("utf-8", "surrogatepass"))
        most = 2 * self.limits.source_bytes
        if size > most:
            message = f"{FIELD}: the grammar made of it has {size} bytes; at most {most} are compiled"
            raise ValidationError(message, parameter=FIELD, value=size)
        key = hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            if key in self._verdicts:
                self._verdicts.move_to_end(key)
                problem = self._verdicts[key]
                is_known = True
            else:
                problem, is_known = None, False
        if not is_known:
            problem = self._run(Task("check", grammar)).problem
            self._keep(key, problem)
        if problem is not None:
            raise ValidationError(f"{FIELD}: {_readable(problem)}", parameter=FIELD, value=None)

    def warm(self) -> None:
        """Start a side process before the first request needs it."""
        self._pool.warm()

    def close(self) -> None:
        """End the side processes."""
        self._pool.close()

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return vocabulary_of(self._tokenizer, self._vocab_size, self._eos_token_ids)

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        tokens = self._vocabulary.tokens
        return {tokens[i].decode("utf-8", "replace"): i for i in self._vocabulary.special_ids}

    def _style(self, params: StructuredOutputsParams) -> JsonStyle:
        style = JsonStyle(is_closed=params.disable_additional_properties)
        pattern = params.whitespace_pattern
        if params.disable_any_whitespace:
            if pattern is not None:
                message = f"{FIELD}: give whitespace_pattern or disable_any_whitespace, not both"
                raise ValidationError(message, parameter=FIELD, value=pattern)
            return JsonStyle(whitespace=None, is_closed=style.is_closed)
        if pattern is not None:
            field = f"{FIELD}.whitespace_pattern"
            written = client_whitespace(pattern, self.limits, field=field)
            return JsonStyle(whitespace=written or None, is_closed=style.is_closed)
        return style

    def _pattern(self, pattern: str, field: str) -> str:
        return translate(pattern, field, is_whole=True, max_bytes=self.limits.pattern_bytes)

    def _choice(self, choices: list[str], lark: Lark, field: str) -> str:
        size = sum(len(choice) for choice in choices)
        if len(choices) > self.limits.enum_values or size > self.limits.source_bytes:
            message = f"{field}: {len(choices)} choices of {size} characters are more than are compiled"
            raise ValidationError(message, parameter=FIELD, value=len(choices))
        if any("\ud800" <= char <= "\udfff" for choice in choices for char in choice):
            raise ValidationError(f"{field}: a choice holds half a character", parameter=FIELD, value=None)
        return lark.any_of(*(lark.plain(choice) for choice in choices))

    def _client_grammar(self, grammar: str) -> str:
        field = f"{FIELD}.grammar"
        size = len(grammar.encode("utf-8", "surrogatepass"))
        if not grammar.strip() or "\0" in grammar or size > self.limits.source_bytes:
            message = f"{field} must be text of 1 to {self.limits.source_bytes} bytes without NUL, got {size} bytes"
            raise ValidationError(message, parameter=FIELD, value=size)
        if is_lark(grammar):
            return checked_lark(grammar, lambda s: enforced_schema(s, self.limits, JsonStyle(), field=field), field)
        verdict = self._run(Task("ebnf", grammar))
        if verdict.problem is not None:
            raise ValidationError(f"{field}: {_readable(verdict.problem)}", parameter=FIELD, value=grammar[:200])
        return verdict.text

    def _run(self, task: Task) -> Verdict:
        verdict = self._pool.run(task)
        if verdict is None:
            limit = self.limits.deadline_seconds
            message = f"{FIELD}: compiling takes more than {limit:g} s, or too much memory; make it simpler"
            raise ValidationError(message, parameter=FIELD, value=None)
        return verdict

    def _keep(self, key: bytes, problem: str | None) -> None:
        with self._lock:
            if key not in self._verdicts:
                self._verdicts[key] = problem
                self._verdict_bytes += VERDICT_BYTES + len(problem or "")
            while self._verdict_bytes > self.limits.cache_bytes and self._verdicts:
                _, old = self._verdicts.popitem(last=False)
                self._verdict_bytes -= VERDICT_BYTES + len(old or "")


def _readable(problem: str) -> str:
    """The first line of what the compiler said, which is the reason; the rest quotes the grammar."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()]
    reason = _OURS.sub("", lines[0]) if lines else ""
    reason = next((ours for theirs, ours in _REWORDED.items() if reason.startswith(theirs)), reason)
    return reason[:500] or "the grammar does not compile"
