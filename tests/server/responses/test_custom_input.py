"""CustomInput: any text comes out of any cutting of its JSON; broken arguments never raise."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.server.responses.custom_input import CustomInput


def _cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


def _read(pieces: list[str]) -> str:
    reader = CustomInput()
    return "".join(reader.feed(piece) for piece in pieces) + reader.close()


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans(), st.lists(st.integers(0, 80)))
def test_any_cutting(text: str, ascii_only: bool, cuts: list[int]) -> None:
    """What went in comes out, with and without escapes, however the arguments were cut."""
    arguments = json.dumps({"input": text}, ensure_ascii=ascii_only)
    assert _read(_cut(arguments, cuts)) == text
    assert _read(list(arguments)) == text
    assert _read(_cut(f' {{ "input" :\n{json.dumps(text)} }}', cuts)) == text


@given(st.text('{}"\\input:u0dD8cC ', max_size=40), st.lists(st.integers(0, 40)))
def test_broken(arguments: str, cuts: list[int]) -> None:
    """Whatever comes, nothing raises, cutting changes nothing, and the result is text that UTF-8 holds."""
    whole = _read([arguments])
    assert _read(_cut(arguments, cuts)) == whole
    whole.encode()


@given(st.text('"\\u0dD83cCeEfx', max_size=30), st.lists(st.integers(0, 40)))
def test_broken_strings(inside: str, cuts: list[int]) -> None:
    """The same inside the string: half escapes, lone surrogates, unknown escapes."""
    arguments = '{"input": "' + inside
    whole = _read([arguments])
    assert _read(_cut(arguments, cuts)) == whole == _read(list(arguments))
    whole.encode()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"patch": "a\\nb"}', "a\nb"),
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": 3}', '{"input": 3}'),
        ("[1, 2", "[1, 2"),
        ("", ""),
        (" " * 1000 + '{"input": "x"}', "x"),
        ('{"input": "cut of', "cut of"),
    ],
)
def test_other_shapes(arguments: str, expected: str) -> None:
    """A tool called with other arguments gets its only string, or the arguments as they are."""
    assert _read([arguments]) == expected == _read(list(arguments))


def test_gives_text_at_once() -> None:
    """Nothing is held that is certain."""
    reader = CustomInput()
    assert [reader.feed(p) for p in ('{"inp', 'ut": "a', "b\\", "nc", "\\u00e", '9"}')] == [
        "",
        "a",
        "b",
        "\nc",
        "",
        "é",
    ]
