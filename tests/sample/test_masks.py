"""Masks of constrained sequences: on top of every other rule, for the rows that have one, and for one step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.core.sampling_params import SamplingParams
from samovar.core.step import TokenMasks
from samovar.sample.sampler import ALL_FORBIDDEN
from tests.sample.numpy_reference import Bench, processed
from tests.sample.test_pipeline import run

WORDS_OF = {23: 1, 32: 1, 70: 3}


def masks(vocab: int, allowed: dict[int, set[int]]) -> TokenMasks:
    """slot -> allowed ids; bits beyond the vocabulary are set, and must not matter."""
    flags = np.ones((len(allowed), WORDS_OF[vocab] * 32), np.uint8)
    for row, ids in enumerate(allowed.values()):
        flags[row, :vocab] = 0
        flags[row, list(ids)] = 1
    return TokenMasks(list(allowed), np.packbits(flags, axis=1, bitorder="little").view(np.int32))


@settings(max_examples=80, deadline=None)
@given(vocab=st.sampled_from(sorted(WORDS_OF)), seed=st.integers(0, 10_000), rows=st.integers(1, 7))
def test_masks_on_any_batch(vocab: int, seed: int, rows: int) -> None:
    """With and without other rules, in every mixture: the reference of each row alone, minus what its mask forbids."""
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(0, 3, (rows, vocab)).astype(np.float32))
    bench, expected, allowed = Bench(vocab), [], {}
    for row in range(rows):
        slot = 40 - row * 3
        rule: dict[str, Any] = {"logit_bias": {3: 9.0}, "repetition_penalty": 1.3} if rng.random() < 0.5 else {}
        params = SamplingParams(**rule)
        bench.start(slot, params, [1, 3])
        line = processed(logits[row].double().numpy(), params, [1, 3], [])
        if rng.random() < 0.6:
            allowed[slot] = set(rng.choice(vocab, rng.integers(1, vocab), replace=False).tolist())
            line[[i for i in range(vocab) if i not in allowed[slot]]] = -np.inf
        expected.append(line)
    slots = [40 - row * 3 for row in range(rows)]
    bench.state.mask(masks(vocab, allowed) if allowed else None)
    np.testing.assert_allclose(run(bench, logits, slots).numpy(), np.array(expected), rtol=1e-4, atol=1e-4)
    assert bench.state.is_plain(np.array(slots)) == (not allowed and not any(bench.state.has_penalties[slots]))
    tokens = bench.sample(logits, slots).token_ids.tolist()
    assert all(token in allowed.get(slot, range(vocab)) for token, slot in zip(tokens, slots, strict=True))
    bench.state.mask(None)
    assert not bench.state.has_mask.any()


def test_free_rows_do_not_notice_and_logprobs_are_raw() -> None:
    """A neighbour's mask changes no draw; logprobs of a masked row are those of the unmasked distribution."""
    logits = torch.randn(3, 70, generator=torch.Generator().manual_seed(1))
    bench = Bench(70)
    for slot in range(3):
        bench.start(slot, SamplingParams(seed=slot, logprobs=3), key=slot)
    plain = bench.sample(logits, [0, 1, 2])
    bench.state.mask(masks(70, {1: {5, 69}}))
    result = bench.sample(logits, [0, 1, 2])
    assert result.token_ids[0] == plain.token_ids[0] and result.token_ids[2] == plain.token_ids[2]
    chosen = int(result.token_ids[1])
    assert chosen in (5, 69) and bench.state.last_sampled[1] == chosen
    entry = result.logprobs[1]
    expected = logits[1].log_softmax(-1)
    assert entry.token_ids[0] == chosen and entry.logprobs[0] == pytest.approx(float(expected[chosen]), abs=1e-5)
    assert entry.token_ids[1:] == expected.topk(3).indices.tolist()


def test_masks_and_rules_that_leave_nothing_fail_that_row_only() -> None:
    """`allowed_token_ids`, or stops held back by `min_tokens`, against the mask: the known error, and the neighbours live."""
    bench = Bench(32)
    bench.start(0, SamplingParams(allowed_token_ids=[1, 2]))
    bench.start(1, SamplingParams(max_tokens=9, min_tokens=4), stop_ids=[7])
    bench.start(2, SamplingParams(temperature=0))
    bench.start(3, SamplingParams(temperature=0))
    bench.state.mask(masks(32, {0: {3, 4}, 1: {7}, 2: {9}}))
    logits = torch.randn(4, 32)
    result = bench.sample(logits, [0, 1, 2, 3])
    assert result.failed == {0: ALL_FORBIDDEN, 1: ALL_FORBIDDEN}
    assert result.token_ids[2] == 9 and result.token_ids[3] == logits[3].argmax()


def test_masks_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit"):
        Bench(70).state.mask(TokenMasks([1], np.zeros((1, 2), np.int32)))
