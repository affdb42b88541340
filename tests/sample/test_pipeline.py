"""Masks, bias and penalties against the NumPy reference, with tokens that the host has not seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.core.sampling_params import SamplingParams
from samovar.sample.pipeline import SampleRows, process
from samovar.sample.sampler import ALL_FORBIDDEN
from tests.sample.numpy_reference import Bench, processed

VOCAB = 23


def run(bench: Bench, logits: torch.Tensor, slots: list[int]) -> torch.Tensor:
    rows = SampleRows(np.array(slots), np.array([bench.lengths[slot] for slot in slots]))
    work = logits.clone()
    process(work, rows, bench.state)
    return work


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty", "repetition_penalty"])
def test_step_one_penalties(name: str) -> None:
    """B068: repetition counts the prompt on step 1; presence and frequency never count prompt tokens."""
    params = SamplingParams(**{name: 1.5})
    logits = torch.linspace(-2, 2, VOCAB)[None]
    bench = Bench(VOCAB)
    bench.start(0, params, [4, 4, 4, 20])
    result = run(bench, logits, [0])
    changed = (result != logits).nonzero()[:, 1].tolist()
    assert changed == ([4, 20] if name == "repetition_penalty" else [])
    np.testing.assert_allclose(result[0], processed(logits[0].numpy(), params, [4, 4, 4, 20], []), atol=1e-5)


ids = st.lists(st.integers(0, VOCAB - 1), max_size=12)
rules = st.fixed_dictionaries(
    {
        "presence_penalty": st.sampled_from([0.0, 0.0, 0.7, -1.2]),
        "frequency_penalty": st.sampled_from([0.0, 0.0, 0.4, -0.9]),
        "repetition_penalty": st.sampled_from([1.0, 1.0, 1.3, 0.7]),
        "min_tokens": st.integers(0, 6),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=4),
        "allowed_token_ids": st.none() | st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9),
        "bad_words_token_ids": st.none() | st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3), max_size=6),
    }
)
row = st.tuples(rules, ids.map(lambda x: [*x, 1]), st.lists(st.integers(0, 4), max_size=9))


@settings(max_examples=150, deadline=None)
@given(rows=st.lists(row, min_size=1, max_size=6), seed=st.integers(0, 1000))
def test_any_rules_on_any_batch(rows: list[tuple[dict[str, Any], list[int], list[int]]], seed: int) -> None:
    """S2-S4, S12, S15, S27, S28 in random company equal the reference of each row alone."""
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    bench, expected = Bench(VOCAB), []
    for slot, (rule, prompt, output) in enumerate(rows):
        params = SamplingParams(max_tokens=20, **rule)
        bench.start(slot + 3, params, prompt, output, stop_ids=[2, 5])
        expected.append(processed(logits[slot].double().numpy(), params, prompt, output, [2, 5]))
    result = run(bench, logits, [slot + 3 for slot in range(len(rows))])
    np.testing.assert_allclose(result.numpy(), np.array(expected), rtol=1e-4, atol=1e-4)


def test_tokens_in_flight_count() -> None:
    """Penalties and bad words see the tokens sampled on the device, step by step, as if they had been given."""
    params = [
        SamplingParams(temperature=0, frequency_penalty=0.8, repetition_penalty=1.2),
        SamplingParams(temperature=0, bad_words_token_ids=[[7, 7], [3], [9, 7, 9]]),
        SamplingParams(seed=1, presence_penalty=2.0, top_k=5),
    ]
    prompt = [1, 2, 7]
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[1, 7], logits[1, 9] = 5.0, 4.9
    ahead, told, outputs = Bench(VOCAB), Bench(VOCAB), [[], [], []]
    for slot in range(3):
        ahead.start(slot, params[slot], prompt, key=slot)
    for _ in range(12):
        for slot in range(3):
            told.start(slot, params[slot], prompt, outputs[slot], key=slot)
        expected = told.sample(logits, [0, 1, 2]).token_ids.tolist()
        assert ahead.advance(logits, [0, 1, 2]) == expected
        for slot in range(3):
            outputs[slot].append(expected[slot])
    said = outputs[1]
    assert 3 not in said and [7, 7] not in [said[i : i + 2] for i in range(11)]
    assert [9, 7, 9] not in [said[i : i + 3] for i in range(10)] and {7, 9} <= set(said)


def test_a_banned_token_is_never_produced() -> None:
    """B073: the greedy choice, biased by -100 or forbidden, is not chosen, whatever else the row asks for."""
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0))
    best = int(logits.argmax())
    for extra in ({}, {"repetition_penalty": 0.5}, {"temperature": 0}, {"top_p": 0.9, "temperature": 2.0}):
        for ban in ({"logit_bias": {best: -100}}, {"bad_words_token_ids": [[best]]}):
            bench = Bench(VOCAB)
            bench.start(0, SamplingParams(**extra, **ban))
            assert best not in {bench.advance(logits, [0])[0] for _ in range(60)}


def test_ids_outside_the_vocabulary_touch_nobody() -> None:
    """B001: stop, bias, allowed and bad-word ids at or beyond the vocabulary leave the neighbours' rows as they were."""
    wild = [VOCAB, VOCAB + 5, 3 * VOCAB + 1, -1, -VOCAB, 2**40]
    params = SamplingParams(
        max_tokens=9,
        min_tokens=4,
        logit_bias={VOCAB + 5: 100.0},
        bad_words_token_ids=[[VOCAB], [1, VOCAB + 1], [VOCAB + 2, 1]],
        allowed_token_ids=[*wild, 3],
    )
    bench = Bench(VOCAB)
    bench.start(0, SamplingParams(temperature=0))
    bench.start(1, params, stop_ids=wild)
    bench.start(2, SamplingParams(temperature=0))
    logits = torch.randn(3, VOCAB)
    result = run(bench, logits, [0, 1, 2])
    assert torch.equal(result[0], logits[0]) and torch.equal(result[2], logits[2])
    assert bench.sample(logits, [0, 1, 2]).token_ids[1] == 3


def test_everything_forbidden_fails_that_row_only() -> None:
    """A row with nothing left to sample is reported; its neighbours are as without it."""
    bench = Bench(VOCAB)
    bench.start(0, SamplingParams(seed=1))
    bench.start(1, SamplingParams(allowed_token_ids=[4], bad_words_token_ids=[[4]]))
    bench.start(2, SamplingParams(temperature=0, allowed_token_ids=[6], logit_bias={1: 2.0}))
    bench.start(3, SamplingParams(allowed_token_ids=[VOCAB + 1]))
    logits = torch.randn(4, VOCAB)
    result = bench.sample(logits, [0, 1, 2, 3])
    assert result.failed == {1: ALL_FORBIDDEN, 3: ALL_FORBIDDEN}
    assert result.token_ids[2] == 6
    assert result.token_ids[0] == bench.sample(logits[:1], [0]).token_ids[0]


def test_min_tokens_ends() -> None:
    """S15: stop ids are masked for exactly `min_tokens` tokens."""
    bench = Bench(VOCAB)
    bench.start(0, SamplingParams(temperature=0, max_tokens=9, min_tokens=3), stop_ids=[8])
    logits = torch.zeros(1, VOCAB)
    logits[0, 8], logits[0, 2] = 5.0, 1.0
    assert [bench.advance(logits, [0])[0] for _ in range(5)] == [2, 2, 2, 8, 8]


def test_a_freed_slot_keeps_nothing() -> None:
    """The next sequence in a slot inherits no rule of the one before."""
    bench = Bench(VOCAB)
    bench.start(
        0, SamplingParams(temperature=0, logit_bias={1: 100.0}, repetition_penalty=2.0, logprobs=3, min_tokens=2)
    )
    bench.start(0, SamplingParams(temperature=0))
    logits = torch.randn(1, VOCAB)
    result = bench.sample(logits, [0])
    assert int(result.token_ids) == int(logits.argmax()) and not result.logprobs
    assert torch.equal(run(bench, logits, [0]), logits)
