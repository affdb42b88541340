"""Patterns: what is let through, Python's `re` and ECMA-262 let through, too; what is no regular language is refused."""

from __future__ import annotations

import json
import random
import re

import pytest

from samovar.core.structured import StructuredOutputsParams
from samovar.errors import ValidationError
from samovar.grammar.compiler import GrammarCompiler
from samovar.grammar.json_source import JsonStyle, enforced_schema
from samovar.grammar.limits import GrammarLimits
from samovar.grammar.regex_rules import translate
from tests.grammar.matching import accepts, start

ATOMS = (
    "a",
    "b",
    "1",
    "_",
    "-",
    " ",
    "\\.",
    "\\/",
    "/",
    '"',
    "&",
    "\\\\",
    "é",
    "\\n",
    "\\$",
    "~",
    "\\x41",
    ".",
    "\\u00e9",
)
CLASSES = ("\\d", "\\w", "\\s", "\\D", "\\W", "\\S")
MEMBERS = ("a-c", "b", "1", "\\-", "&&", "~~", "_", "\\]", "é", ".", "$", "\\n", "[", *CLASSES)
LETTERS = 'ab1_- \n\r\t/"\\[]&~.$^é٣\u2028\u0085\ufeffA😀\x1c'
TIMES = ("", "", "", "", "*", "+", "?", "{2}", "{1,3}", "*?", "{0,2}", "{2,}")


def some_pattern(chance: random.Random, depth: int = 2) -> str:
    def atom() -> str:
        kind = chance.random()
        if kind < 0.35:
            return chance.choice(ATOMS)
        if kind < 0.55:
            return chance.choice(CLASSES)
        if kind < 0.8 or depth == 0:
            inside = "".join(chance.choice(MEMBERS) for _ in range(chance.randint(1, 3)))
            return f"[{'^' if chance.random() < 0.4 else ''}{inside}]"
        return chance.choice(("(", "(?:", "(?P<n>")) + some_pattern(chance, depth - 1).strip("^$") + ")"

    def sequence() -> str:
        return "".join(atom() + chance.choice(TIMES) for _ in range(chance.randint(1, 3)))

    pattern = "|".join(sequence() for _ in range(chance.choice((1, 1, 1, 2))))
    return chance.choice(("", "^")) + pattern + chance.choice(("", "$"))


def grammar_of(pattern: str) -> str:
    schema = {"type": "string", "pattern": pattern}
    return "start: %json " + json.dumps(enforced_schema(schema, GrammarLimits(), JsonStyle(), field="json"))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("number", [80, pytest.param(1500, marks=pytest.mark.slow)])
def test_nothing_gets_through_that_python_would_not_match(number: int) -> None:
    """B118: enforced, or refused."""
    chance, taken, met, wanted = random.Random(number), 0, 0, 0
    for _ in range(number):
        pattern = some_pattern(chance)
        try:
            oracle, grammar = re.compile(pattern), grammar_of(pattern)
        except (re.error, ValidationError):
            continue
        if (error := start(grammar).error) is not None:
            assert "Unsatisfiable" in error or "lookaround" in error, (pattern, error)
            continue
        taken += 1
        for _ in range(12):
            text = "".join(chance.choice(LETTERS) for _ in range(chance.randint(0, 5)))
            if any(char < " " and char not in "\n\r\t" for char in text):
                continue
            is_match = oracle.search(text) is not None
            is_taken = accepts(grammar, json.dumps(text, ensure_ascii=False))
            assert is_match or not is_taken, (pattern, text)
            wanted += is_match
            met += is_match and is_taken
    assert taken > 0.7 * number and met > 0.9 * wanted


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("^.$", ["a", "é", "😀"], ["\n", "\r", "\u2028", "ab", ""]),
        ("^[\\s\\S]$", ["\n", "\u2028", "x"], [""]),
        ("^\\d$", ["7"], ["٣"]),
        ("^[^a&&b]$", ["c"], ["a", "b", "&"]),
        ("^a|b$", ["ax", "xb"], ["xa", "bx"]),
        ("^\\/\\!\\-\\<\\_?$", ["/!-<_"], ["/!-"]),
        ("^\\cJ\\x41\\u0042\\u{43}\\uD83D\\uDE00$", ["\nABC😀"], ["ABC"]),
        ("^hello there indeed\\!$", ["hello there indeed!"], ["hello there indeed\\!"]),
        ("^a{2}{x$", ["aa{x"], ["a{x"]),
        ("^(?<year>[0-9]{4})$", ["2024"], ["24"]),
    ],
)
def test_single_rules(pattern: str, yes: list[str], no: list[str]) -> None:
    grammar = grammar_of(pattern)
    assert [text for text in yes if not accepts(grammar, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in no if accepts(grammar, json.dumps(text, ensure_ascii=False))] == []


BAD = (
    "[a-z", "(a", "a)", "(", "*a", "a**", "a++", "(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(a)\\1", "\\k<n>", "\\bfoo", "a\\B", "[z-a]",
    "[]a]", "[^]", "a{2,1}", "a{,3}", "a{999999999}", "\\", "\\p{", "\\pL", "\\xZZ", "\\u12", "\\ud800", "\\a", "\\Q", "(?i:a)",
    "(?x)a", "\0", "(?P<n", "(" * 200 + ")" * 200, "a" * 20000, "[a-\\d]", "\\c1", "(?#c)",
)  # fmt: skip


@pytest.mark.parametrize("pattern", BAD)
def test_bad_patterns_are_refused(pattern: str) -> None:
    """B107: a bad pattern is a 400 that names it."""
    for is_whole in (False, True):
        with pytest.raises(ValidationError, match="field"):
            translate(pattern, "field", is_whole=is_whole, max_bytes=16384)


def test_whole_patterns(compiler: GrammarCompiler) -> None:
    def grammar(pattern: str) -> str:
        made = compiler.structured(StructuredOutputsParams(regex=pattern))
        compiler.check(made)
        return made

    assert accepts(grammar("^ab|cd$"), "ab") and accepts(grammar("^ab|cd$"), "cd")
    assert not accepts(grammar("ab"), "xab") and not accepts(grammar("ab"), "abx")
    assert accepts(grammar("(?i)AbC"), "aBc") and accepts(grammar("(?s)a.c"), "a\nc")
    assert not accepts(grammar("a.c"), "a\nc")
    assert accepts(grammar('[a-z]+/\\d+"\\\\ é'), 'ab/12"\\ é')
    assert accepts(grammar("(a+)+$"), "aaaa")
    for pattern in ("a^b", "a$b", "(^a)"):
        with pytest.raises(ValidationError, match=r"structured_outputs\.regex"):
            grammar(pattern)
