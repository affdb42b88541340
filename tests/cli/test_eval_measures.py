"""The arithmetic of evaluations: intervals, windows, divergences, answers; no model is loaded."""

from __future__ import annotations

import json
import math
from collections import namedtuple
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from samovar.cli.eval import gsm8k, needle, windows
from samovar.cli.eval.distributions import HEADER_BYTES, DistributionFile, divergence
from samovar.cli.eval.gsm8k import QuestionOptions, choose, last_number, read_questions
from samovar.cli.eval.needle import Case
from samovar.cli.eval.report import plain
from samovar.cli.eval.scoring import _scored_rows
from samovar.cli.eval.statistics import mcnemar, mean_interval, wilson
from samovar.cli.eval.windows import OWN_TEXT, TextOptions, Windows, cut, read_text
from samovar.errors import ConfigError, SamovarError


class Bytes:
    """A tokenizer of bytes, with or without a token of its own before a text."""

    def __init__(self, bos: int | None = None, adds: bool = True) -> None:
        self.bos_token_id, self._adds = bos, adds

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        begins = [] if self.bos_token_id is None or not (add_special_tokens and self._adds) else [self.bos_token_id]
        return begins + list(text.encode())


# --- statistics


def test_wilson() -> None:
    """Against values worked out by hand from Wilson's formula with z = 1.96, and what no normal interval does."""
    assert wilson(5, 10) == pytest.approx((0.23659, 0.76341), abs=1e-4)
    assert wilson(81, 263) == pytest.approx((0.25529, 0.36621), abs=1e-4)
    assert wilson(0, 20)[0] == 0 and wilson(20, 20)[1] == 1
    assert wilson(0, 20)[1] == pytest.approx(1.959964**2 / (20 + 1.959964**2))
    assert wilson(0, 0) == (0.0, 1.0)


def test_mcnemar() -> None:
    first = [True] * 8 + [False] + [True] * 20 + [False] * 5
    second = [False] * 8 + [True] + [True] * 20 + [False] * 5
    # Nine tosses of a coin, and at most one of them on one side.
    assert mcnemar(first, second) == (8, 1, 2 * (1 + 9) / 2**9)
    assert mcnemar(second, first) == (1, 8, 2 * (1 + 9) / 2**9)
    assert mcnemar(first, first) == (0, 0, 1.0)
    assert mcnemar([True, False], [False, True])[2] == 1.0


def test_intervals_of_means_follow_windows_and_repeat() -> None:
    rng = np.random.default_rng(1)
    independent = rng.normal(3.0, 1.0, (400, 5))
    low, high = mean_interval(independent)
    # 1.96 standard errors; percentiles of 4,000 resamples vary by a few percent of that.
    half = 1.96 / math.sqrt(400 * 5)
    assert (low, high) == pytest.approx((independent.mean() - half, independent.mean() + half), abs=0.15 * half)
    assert mean_interval(independent) == (low, high)
    # Rows of a window that are all the same are worth one of them: the interval does not narrow by their number.
    same = np.repeat(rng.normal(3.0, 1.0, (400, 1)), 50, axis=1)
    low, high = mean_interval(same)
    assert high - low == pytest.approx(2 * 1.96 / math.sqrt(400), rel=0.15)
    assert all(map(math.isnan, mean_interval(independent[:1])))
    assert plain({"interval": mean_interval(independent[:1]), "n": [1.5]}) == {"interval": [None, None], "n": [1.5]}


# --- windows


def test_windows_are_cut_and_scored_as_llama_cpp_does() -> None:
    made = cut(Bytes(), "abcdefghijklmnopqrstu", 8, 0)  # type: ignore[arg-type]
    assert made.ids == [list(b"abcdefgh"), list(b"ijklmnop")]
    assert (made.first_row, made.num_rows) == (4, 3)
    assert made.targets(1) == list(b"nop")
    assert cut(Bytes(), "abcdefghijklmnopqrstu", 8, 1).ids == made.ids[:1]  # type: ignore[arg-type]
    odd = Windows([list(range(9))])
    assert (odd.first_row, odd.num_rows, odd.targets(0)) == (4, 4, [5, 6, 7, 8])


def test_every_window_begins_with_the_token_that_texts_begin_with() -> None:
    made = cut(Bytes(bos=300), "abcdefghijklmnop", 8, 0)  # type: ignore[arg-type]
    assert made.ids == [[300, *b"abcdefg"], [300, *b"ijklmno"]]
    never = cut(Bytes(bos=300, adds=False), "abcdefghijklmnop", 8, 0)  # type: ignore[arg-type]
    assert never.ids == [list(b"abcdefgh"), list(b"ijklmnop")]
    own = cut(Bytes(bos=97, adds=False), "aaaaaaaaab", 8, 0)  # type: ignore[arg-type]
    assert own.ids == [list(b"aaaaaaaa")]


def test_texts_that_cannot_be_scored(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the text has only 7 tokens"):
        cut(Bytes(), "abcdefg", 8, 0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_text(TextOptions(text=str(tmp_path / "none")))
    (tmp_path / "raw").write_bytes(b"abc\xff")
    with pytest.raises(ConfigError, match="is not UTF-8 text: invalid start byte at byte 3"):
        read_text(TextOptions(text=str(tmp_path / "raw")))


def test_the_own_text_does_not_change() -> None:
    """Figures of different days are compared over it."""
    text = read_text(TextOptions())
    assert text.isascii() and 50_000 < len(text) < 60 * 1024
    assert Windows([list(text.encode())]).digest()[:16] == "60f2316e22f2a90a"
    assert windows.OWN_TEXT is OWN_TEXT


def test_only_scored_rows_are_passed_on() -> None:
    made, seen = Windows([list(range(12))] * 2), list[tuple[int, slice, list[float]]]()
    listen = _scored_rows(made, 1, lambda window, rows, logits: seen.append((window, rows, logits[:, 0].tolist())))
    for first, last in ((0, 4), (4, 7), (7, 11)):
        listen(first, torch.arange(first, last)[:, None].float())
    assert seen == [(1, slice(0, 1), [6.0]), (1, slice(1, 5), [7.0, 8.0, 9.0, 10.0])]


# --- distributions


def test_divergence_is_its_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, other = (4 * torch.randn(64, 1000, generator=generator) for _ in range(2))
    other[:32] = logits[:32] + 0.01 * other[:32]
    p, q = logits.double().softmax(-1), other.double().softmax(-1)
    expected = (p * (p / q).log()).sum(-1)
    found, agrees = divergence(logits.log_softmax(-1), other)
    # Sums of 1,000 float32 terms of both signs, each at most about its p: 1e-6 absolute is some rounding errors.
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    assert agrees.tolist() == (logits.argmax(-1) == other.argmax(-1)).tolist() and 0 < agrees.sum() < 64
    same, _ = divergence(logits.log_softmax(-1), logits)
    assert same.abs().max() < 1e-6


def test_words_that_cannot_be_add_nothing() -> None:
    logits = torch.tensor([[1.0, 0.0, -torch.inf]])
    assert divergence(logits.log_softmax(-1), logits)[0].tolist() == [0.0]
    cut_off = divergence(torch.tensor([[1.0, 0.0, 0.0]]).log_softmax(-1), logits)[0]
    assert cut_off.isinf().all()


def test_distributions_on_disk(tmp_path: Path) -> None:
    made = Windows([[1, 2, 3, 4, 5, 6, 7, 8], [2, 3, 4, 5, 6, 7, 8, 9]])
    logits = 5 * torch.randn(2, 3, 700, generator=torch.Generator().manual_seed(0)) + 30
    file = DistributionFile.create(tmp_path / "f", "m", made, 700)
    for window in (1, 0):
        file.write(window, slice(1, 3), logits[window, 1:])
        file.write(window, slice(0, 1), logits[window, :1].bfloat16())
        file.write(window, slice(0, 1), logits[window, :1])
    file.flush()
    found, digest = DistributionFile.read(tmp_path / "f")
    assert (found.model, found.shape, digest) == ("m", (2, 3, 700), made.digest())
    for window in range(2):
        kept = found.log_probabilities(window, slice(0, 3), torch.device("cpu"))
        # float16 keeps 11 bits of a distance of at most 40 from the largest logit.
        assert (kept - logits[window].log_softmax(-1)).abs().max() < 40 * 2**-11
        apart, agrees = divergence(kept, logits[window])
        assert apart.abs().max() < 1e-6 and agrees.all()
    found.require(digest, made, 700)
    with pytest.raises(SamovarError, match="scored on other tokens"):
        found.require(digest, Windows(made.ids[:1]), 700)
    with pytest.raises(SamovarError, match="has 700 logits and this model 701"):
        found.require(digest, made, 701)


def test_files_that_hold_no_distributions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Windows([[1, 2, 3, 4, 5, 6, 7, 8]])
    DistributionFile.create(tmp_path / "f", "m", made, 7)
    whole = (tmp_path / "f").read_bytes()
    assert len(whole) == HEADER_BYTES + 3 * 7 * 2
    for damaged in (b"", b"text", b"[1]", whole[:-1], whole.replace(b"samovar", b"samowar")):
        (tmp_path / "f").write_bytes(damaged)
        with pytest.raises(ConfigError, match="is no file of `samovar eval kl`"):
            DistributionFile.read(tmp_path / "f")
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        DistributionFile.read(tmp_path / "none")
    with pytest.raises(ConfigError, match="none/f: cannot be written: No such file"):
        DistributionFile.create(tmp_path / "none" / "f", "m", made, 7)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10, 0, 10))
    with pytest.raises(ConfigError, match=r"distributions take 4\.\d KiB, and .* has 10 B left: score fewer --windows"):
        DistributionFile.create(tmp_path / "g", "m", made, 7)


# --- questions


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so 3 + 4 = 7\n#### 7", 7),
        ("#### 1,250 dollars, not 3", 1250),
        ("The answer is $12.50.", Decimal("12.5")),
        ("18", 18),
        ("#### -4", -4),
        ("first #### 3, then #### 5.00", 5),
        ("It is 9. #### no number", 9),
        ("none", None),
        ("", None),
        ("a range of 10-12", 12),
    ],
)
def test_last_number(text: str, number: Any) -> None:
    assert last_number(text) == number


def test_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "q.jsonl"
    lines = [{"question": f"q{i}", "answer": f"{i} apples\n#### {i}"} for i in range(30)]
    path.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "p", "expected": "1,000"}])) + "\n\n")
    found = read_questions(path)
    assert [q.number for q in found] == [*range(30), 1000] and found[30].text == "p"
    options = QuestionOptions(questions=str(path), num_questions=10)
    chosen = choose(options)
    assert chosen == choose(options) and len(set(chosen)) == 10 and chosen == [q for q in found if q in chosen]
    assert chosen != found[:10]
    assert choose(QuestionOptions(questions=str(path), num_questions=99)) == found
    monkeypatch.setattr(gsm8k, "CARRIERS", (("json", "none.jsonl"), ("no_such_package", "q.jsonl")))
    with pytest.raises(ConfigError, match="no questions: name a file with --questions .* or install json or no_such"):
        choose(QuestionOptions())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no question"),
        (b'{"question": "a", "answer": "1"}\nno', "q:2: is no JSON object"),
        (b"[1]", "q:1: is no JSON object"),
        (b'{"question": "a"}', "q:1: is no JSON object"),
        (b'{"question": "a", "answer": "none"}', "needs a text and an answer that ends with a number, got 'none'"),
        (b'{"question": 5, "answer": "1"}', "q:1: needs a text"),
        (b"\xff", "is not UTF-8"),
    ],
)
def test_files_without_questions(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "q").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_questions(tmp_path / "q")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_questions(tmp_path / "none")


# --- needles


@pytest.mark.parametrize("depth", [1, 25, 50, 100])
def test_needles_lie_where_they_should(depth: int) -> None:
    tokenizer: Any = Bytes()
    case = Case(4000, depth, 1)
    text = case.text(tokenizer)
    sentence = needle.NEEDLE.format(city=case.city, number=case.number)
    assert 3900 < len(text) <= 4000 and text.count(sentence) == 1 == text.count(case.number)
    # A sentence has some 50 bytes.
    assert text.index(sentence) + (len(sentence) if depth == 100 else 0) == pytest.approx(40 * depth, abs=100)
    assert case.text(tokenizer) == text
    other = Case(4000, depth, 2)
    assert other.number != case.number and other.text(tokenizer) != text
    hay = {Case(4000, at, 1).text(tokenizer).split(". ")[0] for at in (50, 75)}
    assert len(hay) == 1


def test_grids_count_by_length_and_depth() -> None:
    found = {Case(length, depth, repeat): repeat == 0 or depth == 50 for length in (512, 1024) for depth in (1, 50)
             for repeat in (0, 1)}  # fmt: skip
    lines = needle.grid("m", found).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["tokens", "1", "%", "50", "%"],
        ["512", "1/2", "2/2"],
        ["1,024", "1/2", "2/2"],
    ]
