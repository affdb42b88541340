"""Drawn tokens follow the distribution that the NumPy reference computes, for every setting S4 to S8 and together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from samovar.core.sampling_params import SamplingParams
from samovar.kernels.sample_tokens.random_numbers import key_bits, uniforms
from tests.sample.numpy_reference import Bench, distribution, processed

VOCAB, DRAWS = 200, 20_000

SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 7},
    {"top_k": 1},
    {"top_p": 0.6},
    {"top_p": 0.999},
    {"min_p": 0.1},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": -1.0},
    {"logit_bias": {3: 4.0, 5: -100.0}, "top_p": 0.9, "frequency_penalty": -0.5},
]


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Normalised statistic: about N(0, 1) if the counts follow `expected`; cells under 8 draws are pooled."""
    rare = expected < 8
    cells = [(c, e) for c, e in zip(counts[~rare], expected[~rare])]
    if expected[rare].sum() >= 8:
        cells.append((counts[rare].sum(), expected[rare].sum()))
    free = max(len(cells) - 1, 1)
    return float((sum((c - e) ** 2 / e for c, e in cells) - free) / np.sqrt(2 * free))


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_draws_follow_the_reference(setting: dict[str, Any]) -> None:
    """S4-S8: a fixed key, 20,000 positions, chi-square against the float64 reference."""
    params = SamplingParams(max_tokens=1, **setting)
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1)) * 2
    prompt, output = [3, 3, 9, 11], [9, 50, 50, 50]
    bench = Bench(VOCAB)
    bench.start(0, params, prompt, output, key=1234)
    expected = distribution(processed(logits.double().numpy(), params, prompt, output), params) * DRAWS
    counts = np.zeros(VOCAB)
    ends = len(prompt) + len(output)
    if params.has_penalties:
        for key in range(DRAWS // 1000):
            for slot in range(50):
                bench.start(slot, params, prompt, output, key=key * 50 + slot)
            tokens = bench.sample(logits.expand(50, -1), list(range(50))).token_ids
            counts += np.bincount(tokens.numpy(), minlength=VOCAB)
        expected *= counts.sum() / DRAWS
    else:
        positions = list(range(ends, ends + DRAWS))
        tokens = bench.sample(logits.expand(DRAWS, -1), [0] * DRAWS, positions).token_ids
        counts += np.bincount(tokens.numpy(), minlength=VOCAB)
    assert not counts[expected == 0].any()
    assert chi_square(counts, expected) < 4


def test_the_chi_square_would_notice() -> None:
    """The yardstick of this file fails on a slightly wrong distribution."""
    p = np.full(VOCAB, 1 / VOCAB)
    wrong = p.copy()
    wrong[: VOCAB // 2] *= 1.3
    drawn = np.random.default_rng(0).choice(VOCAB, DRAWS, p=wrong / wrong.sum())
    assert chi_square(np.bincount(drawn, minlength=VOCAB), p * DRAWS) > 4


def test_uniforms_are_uniform_and_independent() -> None:
    """No pattern along positions, along neighbouring keys, or between both."""
    keys, positions = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300, dtype=np.int64), indexing="ij")
    u = uniforms(keys.ravel(), positions.ravel()).reshape(300, 300)
    assert u.min() >= 0 and u.max() < 1
    counts = np.histogram(u, bins=100, range=(0, 1))[0]
    assert chi_square(counts, np.full(100, u.size / 100)) < 4
    for left, right in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, 1:], u[:-1, :-1])):
        assert abs(np.corrcoef(left.ravel(), right.ravel())[0, 1]) < 4 / np.sqrt(left.size)
    assert len(np.unique(u)) == u.size


def test_keys_of_any_width() -> None:
    """B010: any integer is a key; negative and wide ones wrap and never raise."""
    keys = np.array([key_bits(k) for k in (0, -1, 2**62, -(2**63), 2**64 + 5, 10**30)])
    assert len(set(uniforms(keys, np.zeros(6, np.int64)).tolist())) == 6
    assert key_bits(5) == key_bits(2**64 + 5)
