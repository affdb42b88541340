"""Stop strings: against a brute-force search, for any text, any stops and any chunks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.text.stop import StopMatcher, compile_stops

SMALL = st.text("ab\n", max_size=40)
STOPS = st.lists(st.text("ab\n", min_size=1, max_size=6), max_size=5)


def reference(text: str, stops: list[str], *, include: bool) -> tuple[str, str | None]:
    """The match that ends first, the longest of several; by trying every end."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


def run(chunks: list[str], stops: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    matcher = StopMatcher(compile_stops(tuple(stops)), include_stop=include)
    out = [matcher.feed(chunk) for chunk in chunks]
    out.append("" if matcher.match is not None else matcher.flush())
    return out, matcher.match


def cut(text: str, cuts: list[int]) -> list[str]:
    places = sorted({0, len(text), *(c % (len(text) + 1) for c in cuts)})
    return [text[a:b] for a, b in pairwise(places)]


@given(SMALL, STOPS, st.lists(st.integers(0, 100), max_size=12), st.booleans())
def test_equals_brute_force(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    """B031, B035, B037: same text and same stop as a whole-text search, however the text is cut."""
    out, match = run(cut(text, cuts), stops, include=include)
    assert ("".join(out), match) == reference(text, stops, include=include)


@given(SMALL, STOPS)
def test_holds_back_no_more_than_needed(text: str, stops: list[str]) -> None:
    """B032: what is held back is exactly the longest tail that begins a stop string."""
    matcher = StopMatcher(compile_stops(tuple(stops)))
    shown = ""
    for n, char in enumerate(text, 1):
        shown += matcher.feed(char)
        if matcher.match is not None:
            return
        starts = {stop[:k] for stop in stops for k in range(1, len(stop))}
        tail = next((text[n - k : n] for k in range(n, 0, -1) if text[n - k : n] in starts), "")
        assert shown + tail == text[:n] and matcher.num_held == len(tail)


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_prefix_of_a_stop_is_never_shown(size: int) -> None:
    """B031: nothing of the stop string comes out before the match is complete."""
    text = "DEFGHIJKL"
    out, match = run([text[i : i + size] for i in range(0, len(text), size)], ["DEFGHIJ"])
    assert "".join(out) == "" and match == "DEFGHIJ"


def test_long_stop_does_not_delay() -> None:
    """B032: a long stop string does not hold back text that cannot begin it; each token's text goes out at once."""
    chunks = ["hel", "lo", " wor", "ld"]
    out, match = run(chunks, ["a 40 character string ................"])
    assert out == [*chunks, ""] and match is None


def test_inside_a_chunk() -> None:
    """B037: a stop in the middle of a token's text; B035: each entry keeps its own string."""
    assert run(["x.\n\ny"], ["\n\n"]) == (["x.", ""], "\n\n")
    assert run(["x END y"], ["nothing", "END"]) == (["x ", ""], "END")


def test_which_match_counts() -> None:
    """B035: the first completed match ends the text; of two completed together the longer is cut off."""
    assert run(["abcd"], ["bcd", "c"]) == (["ab", ""], "c")
    assert run(["xab"], ["b", "ab"]) == (["x", ""], "ab")
    assert run(["xab"], ["ab", "b"]) == (["x", ""], "ab")


def test_duplicate_and_unicode_stops() -> None:
    """B034: repeated entries and stops beyond the BMP; NUL is a character like others (B026)."""
    assert run(["a\U0001f642b"], ["\U0001f642", "\U0001f642"]) == (["a", ""], "\U0001f642")
    assert run(["a\x00b"], ["\x00b"]) == (["a", ""], "\x00b")


def test_nothing_after_a_match() -> None:
    """B031: text after the match never comes out."""
    matcher = StopMatcher(compile_stops(("x",)))
    assert matcher.feed("axb") == "a" and matcher.feed("c") == "" and matcher.flush() == ""


def test_work_is_linear() -> None:
    """B034: stops made to trigger the worst case of naive matching; steps per character stay constant on average."""
    steps = 0
    automaton = compile_stops(tuple("a" * n + "b" for n in (1023, 512, 200, 3)))
    original = automaton.fallback

    class Counting(list[int]):
        def __getitem__(self, at: int) -> int:  # type: ignore[override]
            nonlocal steps
            steps += 1
            return original[at]

    automaton.fallback = Counting(original)
    matcher = StopMatcher(automaton)
    text = ("a" * 1022 + "c") * 20
    shown = "".join(matcher.feed(char) for char in text) + matcher.flush()
    automaton.fallback = original
    assert shown == text and steps <= 2 * len(text)
