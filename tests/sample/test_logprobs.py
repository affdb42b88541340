"""Logprobs against a float64 log-softmax, with defined order and ranks among equal logits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.core.sampling_params import SamplingParams
from samovar.sample.logprobs import best, best_by_key, measure, token_logprobs
from samovar.sample.state import resolve_count
from tests.sample.numpy_reference import Bench

VOCAB = 97


def expected_order(row: torch.Tensor, count: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-float(row[i]), i))[:count]


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.sampled_from([0, 1, 5, 20, 60, VOCAB]), min_size=1, max_size=8),
    seed=st.integers(0, 999),
    is_tied=st.booleans(),
)
def test_against_float64(counts: list[int], seed: int, is_tied: bool) -> None:
    """B062, S16: any number of alternatives up to the vocabulary, values within 1e-5, ties by id, ranks by count."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(counts), VOCAB, generator=generator) * 5
    logits = logits.round() if is_tied else logits
    chosen = torch.randint(0, VOCAB, (len(counts),), generator=generator)
    entries = token_logprobs(logits, chosen, np.array(counts))
    exact = logits.double().log_softmax(-1)
    for row, (entry, count) in enumerate(zip(entries, counts, strict=True)):
        assert entry.token_ids == [int(chosen[row]), *expected_order(logits[row], count)]
        assert entry.rank == 1 + int((logits[row] > logits[row, chosen[row]]).sum())
        np.testing.assert_allclose(entry.logprobs, exact[row, entry.token_ids], atol=1e-5)


def test_raw_distribution() -> None:
    """Logprobs ignore temperature, penalties, masks and bias: they speak of the model."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    bench = Bench(VOCAB)
    bench.start(
        0,
        SamplingParams(
            temperature=2, repetition_penalty=2.0, logit_bias={4: 90.0}, top_k=1, bad_words_token_ids=[[9]], logprobs=3
        ),
        [1, 2],
    )
    entry = bench.sample(logits, [0]).logprobs[0]
    assert entry.token_ids[0] == 4 and entry.token_ids[1:] == expected_order(logits[0], 3)
    np.testing.assert_allclose(entry.logprobs, logits[0].double().log_softmax(-1)[entry.token_ids], atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "means"), [(None, -1), (0, 0), (-1, VOCAB), (VOCAB + 1, VOCAB), (1_000_000, VOCAB), (21, 21)]
)
def test_more_than_the_vocabulary(asked: int | None, means: int) -> None:
    """B002: a count beyond the vocabulary is the vocabulary, if one ever got past the front end's bound."""
    assert resolve_count(asked, VOCAB) == means
    bench = Bench(VOCAB)
    bench.start(0, SamplingParams(logprobs=asked))
    bench.start(1, SamplingParams(temperature=0))
    logits = torch.randn(2, VOCAB)
    result = bench.sample(logits, [0, 1])
    assert result.token_ids[1] == logits[1].argmax()
    assert [len(e.token_ids) for e in result.logprobs.values()] == ([means + 1] if means >= 0 else [])


@pytest.mark.parametrize("kind", ["plain", "tied", "zeros", "masked"])
def test_the_form_without_looking_finds_the_same(kind: str) -> None:
    """What a GPU computes: one integer for each logit and id, whose largest are the best; -0 and 0 are equal."""
    x = torch.randn(5, 3000, generator=torch.Generator().manual_seed(4)) * 3
    x = {"plain": x, "tied": x.round(), "zeros": x.sign() * 0.0, "masked": x.where(x > 2, -torch.inf)}[kind]
    for count in (1, 7, 700):
        ids, values = best(x, count)
        by_key = best_by_key(x, count)
        assert torch.equal(ids, by_key[0]) and torch.equal(values, by_key[1])
        assert ids[0].tolist() == expected_order(x[0], count)


def test_rows_without_a_distribution_are_told() -> None:
    """NaN, infinity and nothing at all are reported by row, and leave the other rows' entries as they are."""
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(2))
    chosen, counts = torch.tensor([3, 4, 5, 6]), np.array([2, 2, 2, 2])
    alone = token_logprobs(logits[3:], chosen[3:], counts[3:])
    logits[0, 9], logits[1, 9], logits[2] = torch.nan, torch.inf, -torch.inf
    measured = measure(logits, chosen, 2)
    assert measured.is_finite.tolist() == [False, False, False, True]
    assert measured.entries(counts)[3:] == alone
