"""Expressions of grammars: what a `Lark` writes matches what it says, for every character and every special token."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.text.lark import Lark
from tests.grammar.matching import SPECIALS, TOKENIZER, accepts, babble, start, takes, text_of

IDS = {text: TOKENIZER.special(text) for text in SPECIALS}
anything = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(lambda text: ">" not in text)
pieces = st.lists(st.one_of(anything, st.just('<">'), st.sampled_from(SPECIALS[2:])), max_size=4).map("".join)


def lark() -> Lark:
    return Lark(IDS.get)


@settings(max_examples=150, deadline=None)
@given(pieces, anything)
def test_a_literal_matches_itself_and_nothing_else(literal: str, other: str) -> None:
    made = lark()
    grammar = made.document(made.text(literal))
    assert accepts(grammar, literal)
    assert accepts(grammar, other) == (other == literal)
    assert not accepts(grammar, literal + "x")


@settings(max_examples=60, deadline=None)
@given(pieces)
def test_plain_text_is_spelled_with_ordinary_tokens(literal: str) -> None:
    """B142: text that looks like a special token is none."""
    made = lark()
    grammar = made.document(made.plain(literal))
    assert takes(start(grammar), list(literal.encode()))
    if any(special in literal for special in SPECIALS):
        assert not accepts(grammar, literal)


def test_special_tokens_match_by_id_only() -> None:
    made = lark()
    grammar = made.document(made.text("a<tool>b"))
    assert takes(start(grammar), [ord("a"), IDS["<tool>"], ord("b")])
    assert not takes(start(grammar), list(b"a<tool>b"))


@pytest.mark.parametrize("marker", ["</p>", "</tool>", 'x"\\\n', "é😀", "aab"])
@settings(max_examples=40, deadline=None)
@given(text=st.text(st.sampled_from("ab</pé\n x"), max_size=10))
def test_until_ends_at_the_first_marker(marker: str, text: str) -> None:
    made = lark()
    grammar = made.document(made.seq(made.until(marker), made.text("!")))
    assert accepts(grammar, text + marker + "!") == (marker in SPECIALS or (text + marker).find(marker) == len(text))
    assert not accepts(grammar, text + "!")


@pytest.mark.parametrize("mark", ["<tool>", "<TC>", "[TOOL]", "{"])
def test_free_text_and_then_a_region(mark: str) -> None:
    made = lark()
    call = made.rule("call", made.seq(made.text(mark + '"f": '), made.json(None), made.text(";")))
    grammar = made.document(made.free_then([mark, "<|never|>"], made.many(call, least=1, separator=made.text("\n"))))
    one = mark + '"f": {"a":[1]};'
    for text in ("", "hello", "x < y [T", one, "hi " + one, one + "\n" + one):
        assert accepts(grammar, text), text
    for text in ("hi " + mark, mark + '"g": {};', "a <|never|> b", one + one, one + "\n"):
        assert not accepts(grammar, text), text


def test_marks_that_count_at_the_start_only() -> None:
    made = lark()
    region = made.seq(made.text('{"f": '), made.json(None), made.text("}"))
    grammar = made.document(made.free_then(["{"], region, only_at_start=True))
    for text in ("", "hello", "a {b}", '{"f": {}}'):
        assert accepts(grammar, text), text
    for text in ("{", " {a", '{"g": {}}', '\n {"f": {}}'):
        assert not accepts(grammar, text), text


@pytest.mark.parametrize("separator", [None, ",", "<tool>"])
@pytest.mark.parametrize(("least", "most"), [(0, None), (1, None), (0, 1), (2, 4), (3, 3), (0, 0)])
def test_repetition_is_counted(separator: str | None, least: int, most: int | None) -> None:
    made = lark()
    between = None if separator is None else made.text(separator)
    grammar = made.document(made.seq(made.many(made.text("ab"), least=least, most=most, separator=between), "/!/"))
    for number in range(6):
        text = (separator or "").join(["ab"] * number) + "!"
        assert accepts(grammar, text) == (least <= number and (most is None or number <= most)), number


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(max_size=6), min_size=2, max_size=6))
def test_names_of_rules_are_unique_and_legal(names: list[str]) -> None:
    made = lark()
    given_names = [made.rule(name, made.text(str(at))) for at, name in enumerate(names)]
    assert len(set(given_names)) == len(names)
    grammar = made.document(made.seq(*given_names))
    assert accepts(grammar, "".join(map(str, range(len(names)))))


def test_patterns_may_hold_slashes_and_line_ends() -> None:
    made = lark()
    grammar = made.document(made.seq(made.regex("[a/]+\\/\n\\\n(?:/|b)"), made.text("!")))
    assert accepts(grammar, "a/a/\n\nb!")


def test_programming_mistakes_are_told() -> None:
    made = lark()
    for mistake in (
        lambda: made.any_of(),
        lambda: made.until(""),
        lambda: made.many("x", least=3, most=2),
        lambda: made.free_then(["<TC>"], made.text("other")),
    ):
        with pytest.raises(ValueError, match=r"Lark\."):
            mistake()


def test_schemas_go_through_the_source_of_schemas() -> None:
    seen = []

    def source(schema: object) -> dict[str, object]:
        seen.append(schema)
        return {"const": 7}

    made = Lark(IDS.get, schema_source=source)
    grammar = made.document(made.any_of(made.json(None), made.json({"a": 1})))
    assert seen == [None, {"a": 1}] and accepts(grammar, "7") and not accepts(grammar, "{}")


def test_babble_in_free_text_never_calls_halfway() -> None:
    made = lark()
    region = made.seq(made.text("<TC>"), made.text("ok"), made.text("</TC>"))
    grammar = made.document(made.free_then(["<TC>"], region))
    for seed in range(60):
        said, is_over = babble(start(grammar), random.Random(seed), 40)
        text = b"".join(TOKENIZER.token_bytes(i) for i in said).decode("utf-8", "ignore")
        if is_over and "<TC>" in text:
            assert text.endswith("<TC>ok</TC>") and text_of(said) == text
