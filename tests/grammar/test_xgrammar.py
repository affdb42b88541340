"""xgrammar as the second backend: on what the gate lets through it says what llguidance says, token by token."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from samovar.config.engine import EngineConfig
from samovar.core.constraint import Constraint, ReasoningSpan
from samovar.errors import ValidationError
from samovar.grammar.json_source import JsonStyle, enforced_schema
from samovar.grammar.limits import GrammarLimits
from samovar.grammar.matcher import Matchers, SequenceMatcher
from samovar.grammar.plain_schemas import plain_grammar
from samovar.grammar.xgrammar_matcher import XGrammarMatcher
from samovar.text.gguf_tokenizer import load_gguf
from samovar.text.lark import Lark
from tests.grammar.matching import END, EOS, MATCHERS, PADDED, TOKENIZER, allowed, start, takes, text_of
from tests.grammar.plain_schemas_maker import plain_schema
from tests.grammar.test_schema_suite import DRAFTS, cases
from tests.text.byte_tokenizer import ByteTokenizer

pytestmark = pytest.mark.skipif(find_spec("xgrammar") is None, reason="the extra `xgrammar` is not installed")

THINK, UNTHINK = TOKENIZER.special("<think>"), TOKENIZER.special("</think>")
SECOND = Matchers(TOKENIZER, PADDED, [EOS, END], prefers_xgrammar=True)
STYLES = (JsonStyle(), JsonStyle(whitespace=None))


def grammar_of(schema: Any, style: JsonStyle = STYLES[0]) -> str:
    """The grammar the front end makes of a schema."""
    lark = Lark({}.get, schema_source=lambda s: enforced_schema(s, GrammarLimits(), style, field="json"))
    return lark.document(lark.json(schema))


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


TEXT, WHOLE, NUMBER, FLAG = ({"type": name} for name in ("string", "integer", "number", "boolean"))
PLAIN: dict[str, Any] = {
    "flat object": closed(name=TEXT, age=WHOLE, score=NUMBER, member=FLAG),
    "nested": closed(
        id=WHOLE,
        lines={"type": "array", "items": closed(sku=TEXT, price=NUMBER)},
        note={"type": ["string", "null"]},
    ),
    "enums": closed(city={"enum": ["Tokyo", "Paris", "Berlin", "Lagos", "Lima"]}, unit={"enum": ["c", "f"]}),
    "eight optional": closed([], **{f"field_{i}": TEXT for i in range(8)}),
    "list of strings": {"type": "array", "items": TEXT},
}
NOT_PLAIN: list[Any] = [
    {},
    {"type": "object"},
    {"type": "object", "properties": {"a": TEXT}},
    {"type": "object", "properties": {"a": TEXT}, "additionalProperties": TEXT},
    {**closed(), "required": ["a"], "properties": {}, "patternProperties": {"^a$": TEXT}},
    {**closed(a=TEXT), "minProperties": 1},
    closed([], **{f"f{i}": TEXT for i in range(9)}),
    {"type": "array"},
    {"type": "array", "items": True},
    {"type": "array", "items": TEXT, "prefixItems": [WHOLE]},
    {"type": "array", "items": TEXT, "minItems": 65},
    {"type": "string", "maxLength": 3},
    {"type": "string", "pattern": "a"},
    {"type": "string", "format": "date"},
    {"type": "number", "minimum": 0},
    {"type": "integer", "multipleOf": 2},
    {"enum": [1.5]},
    {"enum": [["a"]]},
    {"const": {"a": 1}},
    {"anyOf": [TEXT, {"type": "string", "minLength": 2}]},
    {"anyOf": [TEXT], "type": "string"},
    {"anyOf": [{"type": "array", "items": TEXT}, {"anyOf": [{"type": "array", "items": FLAG}]}]},
    {"anyOf": [closed(a={"const": i}) for i in range(5)]},
    {"oneOf": [TEXT, FLAG]},
    {"allOf": [TEXT]},
    {"$ref": "#/$defs/a", "$defs": {"a": TEXT}},
    closed(**{f"property {i}": {"enum": [f"value {j}" for j in range(40)]} for i in range(40)}),
]


def second(schema: Any, style: JsonStyle = STYLES[0]) -> SequenceMatcher:
    matcher = start(grammar_of(schema, style), matchers=SECOND)
    assert isinstance(matcher.bare_grammar, XGrammarMatcher)
    return matcher


def compare(
    one: SequenceMatcher, other: SequenceMatcher, chance: random.Random, steps: int, counts: Counter[str]
) -> str | None:
    """An answer by chance that both backends follow; None if it was cut.

    llguidance has one spelling for text that can only continue in one way, and xgrammar all of them. Nothing else may
    differ: what only xgrammar allows has to be the same text, which llguidance takes byte by byte.
    """
    said: list[int] = []
    for _ in range(steps):
        ours, theirs = allowed(other), allowed(one)
        assert ours is not None and theirs is not None and theirs <= ours, text_of(said)
        assert max(ours) < TOKENIZER.vocab_size
        for token in ours - theirs:
            counts["other spellings"] += 1
            copy, spelled = one.bare_grammar, TOKENIZER.token_bytes(token)
            assert copy is not None and spelled
            assert copy.deep_copy().try_consume_tokens(list(spelled)) == len(spelled), (said, spelled)
        counts["masks"] += 1
        token = chance.choice(sorted(theirs))
        one.advance(token)
        other.advance(token)
        assert one.error is None and other.error is None
        assert one.is_finished == other.is_finished
        if token in (EOS, END):
            return text_of(said)
        said.append(token)
        if one.is_finished:
            return text_of(said)
    return None


def test_answers_by_chance_of_schemas_by_chance(capsys: pytest.CaptureFixture[str]) -> None:
    """B110, B112: 300 schemas; what comes out validates, and both backends allow the same at every token."""
    counts = Counter[str]()
    for seed in range(300):
        chance = random.Random(seed)
        schema = plain_schema(chance)
        style = STYLES[seed % 2]
        grammar = grammar_of(schema, style)
        if start(grammar).error is not None:
            counts["nothing valid"] += 1
            continue
        if plain_grammar(grammar) is None:
            counts["too large"] += 1
            continue
        validator = jsonschema.Draft202012Validator(schema)
        for _ in range(2):
            text = compare(start(grammar), second(schema, style), chance, 100, counts)
            counts["cut" if text is None else "whole"] += 1
            if text is not None:
                assert [e.message for e in validator.iter_errors(json.loads(text))] == [], (schema, text)
    with capsys.disabled():
        print(f"\n{dict(counts)}")
    assert counts["whole"] > 300 and counts["too large"] < 30 and counts["nothing valid"] < 30


@pytest.mark.parametrize("draft", DRAFTS)
def test_suite(draft: str, capsys: pytest.CaptureFixture[str]) -> None:
    """B118: of the schemas inside the gate no invalid document gets through, and as many valid ones as elsewhere."""
    counts, wrong = Counter[str](), []
    for name, schema, tests in cases(draft):
        try:
            grammar = grammar_of(schema)
        except ValidationError:
            continue
        if plain_grammar(grammar) is None or start(grammar).error is not None:
            continue
        counts["schemas"] += 1
        for test in tests:
            ids = TOKENIZER.encode(json.dumps(test["data"], ensure_ascii=False))
            taken = takes(second(schema), ids)
            counts["valid" if test["valid"] else "invalid"] += 1
            if taken != takes(start(grammar), ids) or (taken and not test["valid"]):
                wrong.append((name, test["description"], schema, test["data"]))
    with capsys.disabled():
        print(f"\n{draft}: {dict(counts)}, {len(wrong)} wrong")
    assert wrong == []
    assert draft == "draft3" or counts["invalid"] > 20


def test_documents_that_are_nearly_right() -> None:
    """One byte is changed, left out or put in: both backends agree about what is left."""
    chance = random.Random(1)
    counts = Counter[bool]()
    for schema in PLAIN.values():
        grammar = grammar_of(schema)
        for _ in range(4):
            text = compare(start(grammar), second(schema), chance, 400, Counter()) or ""
            ids = list(text.encode())
            for _ in range(60):
                at = chance.randrange(len(ids) + 1)
                changed = (
                    ids[:at]
                    + chance.choice([[], [chance.randrange(256)], [34], [92]])
                    + ids[at + chance.randint(0, 1) :]
                )
                taken = takes(second(schema), changed)
                assert taken == takes(start(grammar), changed), bytes(changed)
                counts[taken] += 1
    assert counts[True] > 50 and counts[False] > 200


@pytest.mark.parametrize("case", range(len(NOT_PLAIN)))
def test_everything_else_is_for_llguidance(case: int) -> None:
    matcher = start(grammar := grammar_of(NOT_PLAIN[case]), matchers=SECOND)
    assert plain_grammar(grammar) is None
    assert matcher.error is None and not isinstance(matcher.bare_grammar, XGrammarMatcher)


@pytest.mark.parametrize(
    "grammar",
    [
        "start: /a/",
        '%llguidance {}\nstart: %json {"type": "string"}',  # options of another origin
        grammar_of(TEXT) + 'more: "x"\n',
        grammar_of(TEXT).replace("\nstart: ", '\nstart: "x" '),
        grammar_of(TEXT).replace("[ \\\\t]", "[ ]"),
        "%llguidance {}\nstart: %json " + "[" * 9_000,
        "%llguidance {}\nstart: %json true",
    ],
)
def test_only_whole_grammars_of_one_schema_are_read(grammar: str) -> None:
    assert plain_grammar(grammar_of(TEXT)) is not None
    assert plain_grammar(grammar) is None


def test_special_tokens_and_ids_without_text_are_never_allowed() -> None:
    """B142: the characters of a mark inside a string are ordinary tokens."""
    matcher = second(TEXT)
    matcher.advance(ord('"'))
    inside = allowed(matcher) or set()
    assert inside and not {EOS, END, THINK, UNTHINK} & inside and max(inside) < TOKENIZER.first_special
    for byte in b'<think>"':
        matcher.advance(byte)
    assert matcher.is_finished and matcher.error is None


def test_every_end_of_sequence_is_allowed_at_the_end_only() -> None:
    for end in (EOS, END):
        matcher = second(NUMBER)
        assert not {EOS, END} & (allowed(matcher) or set())
        matcher.advance(ord("1"))
        assert {EOS, END} <= (allowed(matcher) or set()) and not matcher.is_finished
        matcher.advance(end)
        assert matcher.error is None and matcher.is_finished
        matcher.advance(end)  # as llguidance: the end may be said again
        assert matcher.error is None and allowed(matcher) == {EOS, END}


@pytest.mark.parametrize("token", [ord("]"), THINK, PADDED - 1])
def test_a_token_that_is_not_allowed_is_an_error_that_stays(token: int) -> None:
    matcher = second(closed(a=WHOLE))
    matcher.advance(ord("{"))
    matcher.advance(token)
    assert matcher.error is not None and "followed" in matcher.error
    matcher.advance(ord('"'))
    assert matcher.error is not None and allowed(matcher) == {EOS, END} and not matcher.is_finished
    assert second(closed(a=WHOLE)).error is None


def test_thinking_comes_first() -> None:
    grammar = grammar_of(closed(a=WHOLE))
    span = ReasoningSpan(is_open=False, start_ids=[THINK], end_ids=[UNTHINK], budget=3)
    matcher = SECOND.start(Constraint(grammar=grammar, reasoning=span))
    first = allowed(matcher)
    assert first is not None and THINK in first and ord("{") in first and ord("[") not in first
    matcher.advance(THINK)
    for token in b"xyz":
        assert {EOS, END}.isdisjoint(allowed(matcher) or set())
        matcher.advance(token)
    assert allowed(matcher) == {UNTHINK}
    matcher.advance(UNTHINK)
    for token in b'{"a":7}':
        assert token in (allowed(matcher) or set())
        matcher.advance(token)
    assert matcher.is_finished and matcher.error is None


def test_an_opening_mark_that_may_be_the_answer() -> None:
    """Both ways stay open; the grammar begins again when it was the mark after all."""
    span = ReasoningSpan(is_open=False, start_ids=list(b'{"x'), end_ids=[UNTHINK])
    for said, is_over in ((b'{"a":1}', True), (b'{"x', False)):
        matcher = SECOND.start(Constraint(grammar=grammar_of(closed(a=WHOLE)), reasoning=span))
        for token in said:
            assert token in (allowed(matcher) or set())
            matcher.advance(token)
        assert matcher.error is None and matcher.is_finished == is_over
    matcher.advance(UNTHINK)
    assert ord("{") in (allowed(matcher) or set()) and not matcher.is_finished


def test_masks_of_both_backends_in_one_step() -> None:
    schemas: list[Any] = [TEXT, {"type": "string", "maxLength": 3}, WHOLE, {"type": "object"}, FLAG]
    matchers = [start(grammar_of(schema), matchers=SECOND) for schema in schemas]
    kinds = [isinstance(matcher.bare_grammar, XGrammarMatcher) for matcher in matchers]
    assert kinds == [True, False, True, False, True]
    mask = np.full((len(matchers), SECOND.words), 0x5A5A5A5A, dtype=np.int32)
    assert SECOND.fill([(matcher, row) for row, matcher in enumerate(matchers)], mask) == [True] * len(matchers)
    for row, schema in enumerate(schemas):
        want = np.zeros(MATCHERS.words, dtype=np.int32)
        assert start(grammar_of(schema)).mask_into(want)
        assert (mask[row] == want).all(), schema


@pytest.mark.parametrize("size", [31, 32, 33])
def test_a_model_without_an_end(size: int) -> None:
    matchers = Matchers(ByteTokenizer(), 257 + size, [], prefers_xgrammar=True)
    matcher = matchers.start(Constraint(grammar=grammar_of({"enum": [1, 12]})))
    assert isinstance(matcher.bare_grammar, XGrammarMatcher)
    assert allowed(matcher, matchers) == {ord("1")}
    matcher.advance(ord("1"))
    assert allowed(matcher, matchers) == {ord("2")} and not matcher.is_finished
    matcher.advance(ord("2"))
    assert matcher.is_finished and matcher.error is None


def test_the_first_backend_is_the_default() -> None:
    matcher = start(grammar_of(TEXT))
    assert not isinstance(matcher.bare_grammar, XGrammarMatcher)
    assert EngineConfig().device.structured_outputs_backend == "auto"


@pytest.mark.slow
def test_speed_of_masks(smollm2: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The table of docs/structured_outputs.md; and that the masks of a real vocabulary are the same, too."""
    tokenizer = load_gguf(smollm2)
    eos = tokenizer.encode("<|im_end|>")[-1]
    both = [Matchers(tokenizer, tokenizer.vocab_size, [eos], prefers_xgrammar=prefers) for prefers in (False, True)]
    with capsys.disabled():
        print("\n| schema | llguidance, mean / max | xgrammar, mean / max | compiled by xgrammar in |")
        for name, schema in PLAIN.items():
            constraint = Constraint(grammar=grammar_of(schema))
            both[0].start(constraint)
            both[1].start(Constraint(grammar=grammar_of({"const": name})))  # loads what is loaded once
            began = time.perf_counter()
            both[1].start(constraint)
            compiled = time.perf_counter() - began
            times = _timed_walks(both, constraint)
            first, second = (f"{np.mean(t) * 1e6:.0f} / {np.max(t) * 1e6:.0f} µs" for t in times)
            print(f"| {name} | {first} | {second} | {compiled * 1e3:.0f} ms |")


def _timed_walks(both: list[Matchers], constraint: Constraint) -> list[list[float]]:
    times: list[list[float]] = [[], []]
    tokens = both[0].vocabulary.tokens
    ids = {token: i for i, token in enumerate(tokens) if len(token) == 1}
    for seed in range(12):
        chance = random.Random(seed)
        matchers = [each.start(constraint) for each in both]
        rows = [np.zeros(each.words, dtype=np.int32) for each in both]
        for _ in range(100):
            for at, matcher in enumerate(matchers):
                began = time.perf_counter()
                matcher.mask_into(rows[at])
                times[at].append(time.perf_counter() - began)
            assert not (rows[0] & ~rows[1]).any()
            allowed_ids = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")) for row in rows]
            for token in set(allowed_ids[1].tolist()) - set(allowed_ids[0].tolist()):
                _same_text(matchers[0], tokens[token], ids)
            token = int(chance.choice(allowed_ids[0]))
            for matcher in matchers:
                matcher.advance(token)
                assert matcher.error is None
            if matchers[0].is_finished or token in both[0].eos_ids:
                break
    return times


def _same_text(matcher: SequenceMatcher, text: bytes, ids: dict[bytes, int]) -> None:
    """Text that only xgrammar allows as one token is taken by llguidance in other tokens."""
    grammar = matcher.bare_grammar
    assert text and grammar is not None
    spelled = [ids[bytes([byte])] for byte in text]
    assert grammar.deep_copy().try_consume_tokens(spelled) == len(spelled), text
