"""The op `sample_tokens`: its reference against exact distributions, its kernels against the reference."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from samovar.core.sampling_params import SamplingParams
from samovar.hardware.device import may_have_gpu
from samovar.kernels.sample_tokens import NOT_FINITE, sample_tokens
from samovar.kernels.sample_tokens.random_numbers import uniforms
from samovar.kernels.sample_tokens.settings import greedy, make
from tests.sample.numpy_reference import distribution
from tests.sample.test_distributions import chi_square

Draw = Callable[..., torch.Tensor]

has_interpreter = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or may_have_gpu(),
    reason="needs Triton, and no GPU: runs its interpreter",
)

MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.011},
    {"temperature": 0.7, "top_k": 3},
    {"temperature": 2.0, "top_k": 1},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.3, "top_p": 0.9999},
    {"temperature": 1.0, "top_p": 1e-9},
    {"temperature": 0.9, "min_p": 0.05},
    {"temperature": 0.9, "min_p": 1.0},
    {"temperature": 1.5, "top_k": 45, "top_p": 0.8, "min_p": 0.01},
]


def table(rows: list[dict[str, Any]]) -> torch.Tensor:
    """Settings of one slot for each of `rows`, keyed by their index, and the dummy slot."""
    numbers = greedy(len(rows) + 1)
    for slot, row in enumerate(rows):
        numbers[slot] = make(**row, key=slot * 7919 - 3)
    return torch.from_numpy(numbers.view(np.int64).reshape(len(numbers), -1))


def run(draw: Draw, logits: torch.Tensor, settings: torch.Tensor, slots: list[int], first: int = 5) -> list[int]:
    """Tokens at positions from `first` on; checks what is remembered for the slots."""
    where = torch.tensor([slots, range(first, first + len(slots))], dtype=torch.int32)
    last = torch.full((len(settings),), 77)
    tokens = draw(logits, settings, where[0], where[1], last)
    assert tokens.dtype == torch.int64
    if len(set(slots)) == len(slots):
        expected = torch.full_like(last, 77)
        expected[slots] = tokens.clamp(min=0)
        assert torch.equal(last, expected)
    return tokens.tolist()


def kernels(monkeypatch: pytest.MonkeyPatch, group: int = 64) -> Draw:
    """The Triton implementation; the smaller `group`, the earlier its searches leave the registers."""
    from samovar.kernels.sample_tokens import triton

    monkeypatch.setattr(triton, "GROUP", group)
    return triton.sample_tokens_triton


def some_logits(rows: int, vocab: int, kind: str) -> torch.Tensor:
    """Ordinary, tied (as rounded ones are), peaked, flat, or mostly forbidden."""
    x = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    masked = x.masked_fill(torch.arange(vocab) % 7 != 3, -torch.inf)
    tied = x.round().where(x.round() != 0, -0.0)
    return {"plain": x, "tied": tied, "peaked": x * 15, "flat": torch.zeros_like(x), "masked": masked}[kind]


@has_interpreter
@pytest.mark.parametrize(
    ("vocab", "kind", "group"),
    [
        (50, "plain", 64),
        (128, "tied", 64),
        (333, "masked", 64),
        (1000, "peaked", 2),
        (1000, "flat", 1),
        (1153, "tied", 1),
        (3000, "plain", 2),
        (3000, "plain", 8),
        (2049, "masked", 2),
    ],
)
def test_kernels_draw_what_the_reference_draws(
    vocab: int, kind: str, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every setting in one batch: the same random number makes the same token."""
    settings, slots = table(MIXED), [*range(len(MIXED))]
    logits = some_logits(len(slots), vocab, kind)
    before = logits.clone()
    assert run(kernels(monkeypatch, group), logits, settings, slots) == run(sample_tokens, logits, settings, slots)
    assert torch.equal(logits, before)


@has_interpreter
def test_kernels_take_no_notice_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row alone, with padding rows and a stride between rows, gets the token it gets in company."""
    settings, draw = table(MIXED), kernels(monkeypatch, 2)
    wide = some_logits(len(MIXED), 700, "plain")
    together = run(draw, wide[:, :650], settings, [*range(len(MIXED))])
    dummy = len(MIXED)
    for slot in (0, 1, 5, 7, 11):
        rows = wide[[slot, 3]][:, :650]
        assert run(draw, rows, settings, [slot, dummy], 5 + slot) == [together[slot], int(rows[1].argmax())]


@pytest.mark.parametrize("name", ["reference", pytest.param("triton", marks=has_interpreter)])
def test_rows_without_a_distribution(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN, infinity, or nothing but -infinity gives no token, and 0 is remembered; the others are as without them."""
    draw: Draw = sample_tokens if name == "reference" else kernels(monkeypatch)
    settings, slots = (
        table([{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 5}] * 3),
        [*range(9)],
    )
    logits = some_logits(9, 300, "plain")
    expected = run(draw, logits, settings, slots)
    logits[1, 299], logits[2, 0], logits[3, 7], logits[4] = torch.nan, torch.inf, torch.nan, -torch.inf
    for row in (1, 2, 3, 4):
        expected[row] = NOT_FINITE
    assert run(draw, logits, settings, slots) == expected


@has_interpreter
def test_greedy_takes_the_lowest_of_equal_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(3, 600)
    logits[0, [130, 400]] = logits[1, [5, 6]] = 2.0
    logits[2] = -torch.inf
    logits[2, 599] = -1e30
    assert run(kernels(monkeypatch), logits, table([{"temperature": 0.0}] * 3), [0, 1, 2]) == [130, 5, 599]


@has_interpreter
def test_draws_of_one_key_follow_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many positions of one key: chi-square against exact probabilities; the kernels make the first of the same draws."""
    vocab, draws, few = 150, 20_000, 40
    setting: dict[str, Any] = {"temperature": 0.8, "top_k": 30, "top_p": 0.9}
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(2)) * 2
    settings = table([setting])
    tokens = run(sample_tokens, logits.expand(draws, -1), settings, [0] * draws)
    expected = distribution(logits.double().numpy(), SamplingParams(**setting)) * draws
    counts = np.bincount(tokens, minlength=vocab)
    assert not counts[expected == 0].any() and chi_square(counts, expected) < 4
    assert run(kernels(monkeypatch), logits.expand(few, -1), settings, [0] * few) == tokens[:few]


@has_interpreter
def test_kernels_compute_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a flat distribution the token is the number itself: any key, early and late positions."""
    vocab, keys = 512, [0, 1, -1, 2**62, -(2**63), 2**64 - 1, 10**30]
    numbers = greedy(len(keys))
    for slot, key in enumerate(keys):
        numbers[slot] = make(1.0, key=key)
    settings = torch.from_numpy(numbers.view(np.int64).reshape(len(keys), -1))
    for first in (0, 2**31 - 20):
        tokens = run(kernels(monkeypatch), torch.zeros(len(keys), vocab), settings, [*range(len(keys))], first)
        positions = np.arange(first, first + len(keys))
        assert tokens == (uniforms(numbers["key"], positions) * vocab).astype(int).tolist()
