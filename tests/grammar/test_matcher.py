"""Matchers: masks, the end of an answer, thinking before it, budgets, and sequences that do not disturb each other."""

from __future__ import annotations

import random

import numpy as np
import pytest

from samovar.core.constraint import Constraint, ReasoningSpan
from samovar.grammar import limits
from samovar.grammar.matcher import Matchers
from tests.grammar.matching import (
    END,
    EOS,
    MATCHERS,
    PADDED,
    PIECES,
    TOKENIZER,
    allowed,
    babble,
    make_matchers,
    start,
    takes,
    text_of,
)  # fmt: skip
from tests.text.byte_tokenizer import ByteTokenizer

OBJECT = (
    'start: %json {"type":"object","properties":{"a":{"type":"integer"}},"required":["a"],"additionalProperties":false}'
)
THINK, UNTHINK = TOKENIZER.special("<think>"), TOKENIZER.special("</think>")
SPELLED = list(b"</think>")


def say(matcher, text: str | bytes | list[int]) -> None:  # type: ignore[no-untyped-def]
    for token in text.encode() if isinstance(text, str) else text:
        assert (now := allowed(matcher)) is None or token in now, (token, TOKENIZER.token_bytes(token))
        matcher.advance(token)
        assert matcher.error is None


def test_ids_without_a_token_are_never_allowed() -> None:
    """The model's vocabulary is padded beyond the tokenizer's."""
    free = allowed(start("start: /(?s:.*)/"))
    assert free is not None and max(free) < TOKENIZER.vocab_size < PADDED
    assert {EOS, END} <= free and THINK not in free


def test_every_end_of_sequence_is_allowed_at_the_end_only() -> None:
    matcher = start('start: "ab"+')
    assert not {EOS, END} & (allowed(matcher) or set())
    say(matcher, "ab")
    assert {EOS, END} <= (allowed(matcher) or set())
    assert not matcher.is_finished
    matcher.advance(END)
    assert matcher.error is None and matcher.is_finished


def test_finished_as_soon_as_nothing_can_follow() -> None:
    matcher = start(OBJECT)
    say(matcher, '{"a": 1')
    assert not matcher.is_finished
    say(matcher, "}")
    assert matcher.is_finished and matcher.error is None
    assert allowed(matcher) == {EOS, END}


def test_a_token_that_is_not_allowed_is_an_error_that_stays() -> None:
    matcher = start(OBJECT)
    matcher.advance(ord("x"))
    assert matcher.error is not None and not matcher.is_finished
    assert allowed(matcher) == {EOS, END}
    matcher.advance(ord("{"))
    assert matcher.error is not None


def test_a_grammar_that_does_not_compile_is_an_error_and_raises_nothing() -> None:
    matcher = start("start: (")
    assert matcher.error is not None and "start" not in matcher.error
    assert allowed(matcher) == {EOS, END}


def test_no_constraint_leaves_the_row_alone() -> None:
    assert allowed(start(None)) is None
    matcher = start(None, ReasoningSpan(is_open=True, end_ids=[UNTHINK]))
    say(matcher, "anything")
    assert allowed(matcher) is None and not matcher.is_finished and matcher.is_free


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("end_ids", [[UNTHINK], SPELLED, [UNTHINK, 10], [ord("a"), ord("a"), ord("b")]])
def test_the_grammar_begins_right_after_the_thinking(is_open: bool, end_ids: list[int]) -> None:
    """B142 and pain 8: no guess, an exact token; the same for marks of one token, of many, and of ordinary text."""
    matcher = start(OBJECT, ReasoningSpan(is_open=is_open, end_ids=end_ids, start_ids=[THINK]))
    if not is_open:
        assert {THINK, ord("{")} <= (allowed(matcher) or set())
        say(matcher, [THINK])
    thinking = allowed(matcher)
    assert thinking is not None and {ord("x"), ord("{"), ord("}")} <= thinking
    assert not {EOS, END} & thinking and max(thinking) < TOKENIZER.vocab_size
    say(matcher, 'hmm {"a": 1} aa')
    assert not matcher.is_finished
    say(matcher, end_ids)
    assert ord("{") in (allowed(matcher) or set()) and ord("x") not in (allowed(matcher) or set())
    say(matcher, '{"a":5}')
    assert matcher.is_finished


def test_a_mark_of_text_is_found_however_it_is_spelled_and_never_split() -> None:
    matcher = start(OBJECT, ReasoningSpan(is_open=True, end_ids=SPELLED))
    piece = {text: 256 + at for at, text in enumerate(PIECES)}
    say(matcher, [ord("x"), piece[b"</"], ord("t"), ord("h")])
    now = allowed(matcher) or set()
    assert piece[b"ink>"] in now and piece[b"ink>{"] not in now
    say(matcher, [piece[b"ink>"]])
    assert allowed(matcher) == allowed(start(OBJECT))


def test_a_special_mark_spelled_with_ordinary_tokens_ends_nothing() -> None:
    matcher = start(OBJECT, ReasoningSpan(is_open=True, end_ids=[UNTHINK]))
    say(matcher, "</think>")
    assert ord("x") in (allowed(matcher) or set())


@pytest.mark.parametrize("grammar", [OBJECT, None])
@pytest.mark.parametrize("end_ids", [[UNTHINK], SPELLED])
@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("is_open", [True, False])
def test_a_spent_budget_forces_the_end(grammar: str | None, end_ids: list[int], budget: int, is_open: bool) -> None:
    span = ReasoningSpan(is_open=is_open, end_ids=end_ids, start_ids=[THINK], budget=budget)
    matcher = start(grammar, span)
    if not is_open:
        say(matcher, [THINK])
    say(matcher, "x" * budget)
    for token in end_ids:
        assert allowed(matcher) == {token}
        matcher.advance(token)
    assert allowed(matcher) == (None if grammar is None else allowed(start(OBJECT)))


def test_thinking_that_ends_within_its_budget_is_not_forced() -> None:
    matcher = start(OBJECT, ReasoningSpan(is_open=True, end_ids=[UNTHINK], budget=5))
    say(matcher, [*b"ok", UNTHINK, *b'{"a": 123456789}'])
    assert matcher.is_finished


def test_an_answer_may_begin_like_the_opening_mark() -> None:
    grammar = 'start: "<thing>" | "<think" "ing>"'
    span = ReasoningSpan(is_open=False, start_ids=list(b"<think>"), end_ids=list(b"</think>"))
    for text in ("<thing>", "<thinking>"):
        matcher = start(grammar, span)
        say(matcher, text)
        assert matcher.is_finished
    matcher = start(grammar, span)
    say(matcher, "<think>free text</think>")
    assert allowed(matcher) == allowed(start(grammar))
    matcher = start('start: "{" /[a-z]+/ "}"', span)
    say(matcher, "<thin")
    assert allowed(matcher) == {ord("k")}
    say(matcher, "k>...</think>{abc}")
    assert matcher.is_finished


def test_the_model_may_not_open_without_opening_marks() -> None:
    matcher = start(OBJECT, ReasoningSpan(is_open=False, end_ids=[UNTHINK]))
    assert allowed(matcher) == allowed(start(OBJECT))


def test_sequences_of_one_request_do_not_disturb_each_other() -> None:
    """n > 1, in any order of steps; a preempted sequence goes on where it was."""
    alone = [babble(start(OBJECT), random.Random(seed), 60)[0] for seed in range(6)]
    together = [start(OBJECT) for _ in alone]
    for step in range(max(map(len, alone))):
        for matcher, said in zip(together, alone):
            if step < len(said):
                assert said[step] in (allowed(matcher) or set())
                matcher.advance(said[step])
    assert all(m.error is None for m in together)
    assert all(takes(start(OBJECT), said) for said, m in zip(alone, together) if m.is_finished)


def test_rows_filled_together_are_the_rows_filled_alone() -> None:
    span = ReasoningSpan(is_open=True, end_ids=[UNTHINK], budget=3)
    wanted = [
        (OBJECT, None),
        ('start: "abc"', None),
        (OBJECT, span),
        (None, None),
        ("start: (", None),
        ("start: /[a-z]+/", None),
    ]
    for _ in range(3):
        matchers = [start(grammar, reasoning) for grammar, reasoning in wanted]
        apart = [start(grammar, reasoning) for grammar, reasoning in wanted]
        mask = np.full((len(wanted) + 2, MATCHERS.words), 77, dtype=np.int32)
        rows = random.sample(range(len(mask)), len(wanted))
        written = MATCHERS.fill(list(zip(matchers, rows)), mask)
        for matcher, row, is_written in zip(apart, rows, written):
            single = np.full(MATCHERS.words, 77, dtype=np.int32)
            assert matcher.mask_into(single) == is_written
            assert (single == mask[row]).all()
        assert (np.delete(mask, rows, axis=0) == 77).all()


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33])
def test_any_size_of_vocabulary_and_models_without_an_end(size: int) -> None:
    for eos in ([], [256], [TOKENIZER.vocab_size + 10_000]):
        matchers = Matchers(ByteTokenizer(), 257 + size, eos)
        matcher = matchers.start(Constraint(grammar='start: /[ab]/ "c"'))
        row = np.zeros((257 + size + 31) // 32, dtype=np.int32)
        assert matchers.words == len(row) and matcher.mask_into(row)
        assert np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() == [97, 98]
        matcher.advance(97)
        matcher.advance(99)
        assert matcher.is_finished


def test_a_model_with_fewer_logits_than_tokens() -> None:
    matchers = Matchers(TOKENIZER, 200, [])
    matcher = matchers.start(Constraint(grammar="start: /(?s:.*)/"))
    row = np.zeros(matchers.words, dtype=np.int32)
    assert matcher.mask_into(row)
    assert max(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))) < 200


def test_a_lexer_that_others_filled_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences with one grammar share its lexer. One that fills it up must not end the others."""
    monkeypatch.setitem(limits.PARSER_LIMITS, "max_lexer_states", 400)
    matchers, grammar = make_matchers(), "start: /[ab]*a[ab]{9}c/"
    chance = random.Random(3)
    for _ in range(12):
        matcher = matchers.start(Constraint(grammar=grammar))
        for _ in range(60):
            now = allowed(matcher, matchers)
            assert now and matcher.error is None
            matcher.advance(chance.choice(sorted(now & {97, 98})))
            assert matcher.error is None


def test_text_comes_out_in_utf8_of_many_bytes_and_tokens() -> None:
    """B121: raw characters, also where tokens are parts of them."""
    matcher = start('start: %json {"type":"string"}')
    piece = {text: 256 + at for at, text in enumerate(PIECES)}
    said = [ord('"'), piece[b"\xf0\x9f"], piece[b"\x98\x80"], piece[b"\xc3"], 0xA9, piece["ж".encode()], ord('"')]
    say(matcher, said)
    assert matcher.is_finished and text_of(said) == '"😀éж"'
    half = start('start: %json {"type":"string"}')
    say(half, [ord('"'), piece[b"\xf0\x9f"]])
    assert ord('"') not in (allowed(half) or set())
