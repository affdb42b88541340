"""A row's token depends on its own logits, settings and key: never on the batch around it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.core.sampling_params import SamplingParams
from samovar.sample.sampler import NOT_FINITE
from tests.sample.numpy_reference import Bench, distribution, processed

VOCAB = 301

setting = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.011, 0.7, 1.0, 2.0]),
        "top_k": st.sampled_from([-1, 0, 1, 3, 40, VOCAB - 1, VOCAB, VOCAB + 1, 9_999_999]),
        "top_p": st.sampled_from([1e-9, 0.1, 0.5, 0.95, 0.9999, 1.0]),
        "min_p": st.sampled_from([0.0, 0.05, 1.0]),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "repetition_penalty": st.sampled_from([1.0, 1.3]),
        "logit_bias": st.sampled_from([None, {3: 5.0}]),
        "logprobs": st.sampled_from([None, 0, 5, -1]),
    }
)


def random_logits(rows: int, seed: int, kind: str) -> torch.Tensor:
    """Ordinary, heavily tied (as bfloat16 models give), peaked, or flat."""
    x = torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))
    return {"plain": x * 4, "tied": (x * 2).round() / 2, "peaked": x * 40, "flat": torch.zeros_like(x)}[kind]


@settings(max_examples=120, deadline=None)
@given(
    batch=st.lists(setting, min_size=2, max_size=12),
    seed=st.integers(0, 10_000),
    kind=st.sampled_from(["plain", "tied", "peaked", "flat"]),
)
def test_row_equals_itself_alone(batch: list[dict[str, Any]], seed: int, kind: str) -> None:
    """B064, B070, B011: any mix of settings in one batch gives each row the token, rank and logprobs it gets alone,
    and a token that the reference distribution allows."""
    logits = random_logits(len(batch), seed, kind)
    bench, slots = Bench(VOCAB), list(range(len(batch)))
    params = [SamplingParams(**each) for each in batch]
    for slot in slots:
        bench.start(slot, params[slot], [slot, 3], [5, 5], key=slot * 77)
    together = bench.sample(logits, slots)
    assert not together.failed
    for slot in slots:
        alone = bench.sample(logits[slot : slot + 1], [slot])
        token = int(together.token_ids[slot])
        assert token == int(alone.token_ids)
        assert together.logprobs.get(slot) == alone.logprobs.get(0)
        p = distribution(processed(logits[slot].double().numpy(), params[slot], [slot, 3], [5, 5]), params[slot])
        assert p[token] > 0 or np.isclose(p, p[token]).sum() > 1


@pytest.mark.parametrize("vocab", [1, 2, 127, 128, 129, 5000])
def test_any_width(vocab: int) -> None:
    """Vocabularies narrower than every block and width inside the sampler."""
    logits = torch.randn(64, vocab, generator=torch.Generator().manual_seed(vocab))
    bench = Bench(vocab)
    for slot in range(64):
        bench.start(
            slot, SamplingParams(top_p=0.9 if slot % 2 else 1.0, top_k=slot * 90, logprobs=min(slot, 20)), key=slot
        )
    tokens = bench.sample(logits, list(range(64))).token_ids
    assert int(tokens.min()) >= 0 and int(tokens.max()) < vocab
    assert vocab == 1 or len(set(tokens.tolist())) > 1


def test_wide_nucleus() -> None:
    """A nucleus wider than the presorted part: flat rows beside peaked ones in one batch."""
    vocab = 5000
    bench = Bench(vocab)
    logits = torch.randn(32, vocab, generator=torch.Generator().manual_seed(5)) * torch.linspace(0.1, 5, 32)[:, None]
    for slot in range(32):
        bench.start(slot, SamplingParams(top_p=0.97), key=slot)
    for position in range(1, 40):
        tokens = bench.sample(logits, list(range(32)), [position] * 32).token_ids
        for slot in range(32):
            assert distribution(logits[slot].double().numpy(), SamplingParams(top_p=0.97))[int(tokens[slot])] > 0


def test_greedy_rows_bypass_scaling() -> None:
    """B070: a greedy row with banned tokens beside sampled ones: no NaN, the best allowed token."""
    logits = torch.randn(8, VOCAB) * 30
    bench = Bench(VOCAB)
    for slot in range(8):
        greedy = SamplingParams(temperature=0, allowed_token_ids=[10, 20, 30], top_p=0.5, top_k=3)
        bench.start(slot, greedy if slot % 2 else SamplingParams(temperature=1), key=slot)
    result = bench.sample(logits, list(range(8)))
    assert not result.failed
    for slot in (1, 3, 5, 7):
        assert int(result.token_ids[slot]) == max((10, 20, 30), key=lambda i: float(logits[slot, i]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("where", ["one", "all"])
def test_broken_rows_stay_alone(bad: float, where: str) -> None:
    """A row of NaN or infinite logits is reported; the others get exactly the tokens they get without it."""
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    bench = Bench(VOCAB)
    rules: list[dict[str, Any]] = [
        {},
        {"temperature": 0},
        {"top_p": 0.5},
        {"repetition_penalty": 2.0},
        {"logprobs": 4},
        {},
    ]
    for slot, rule in enumerate(rules):
        bench.start(slot, SamplingParams(**rule), [1, 2], key=slot)
    expected = bench.sample(logits, list(range(6)))
    for victim in range(6):
        broken = logits.clone()
        broken[victim, 7 if where == "one" else slice(None)] = bad
        result = bench.sample(broken, list(range(6)))
        assert result.failed == {victim: NOT_FINITE}
        assert victim not in result.logprobs and int(result.token_ids[victim]) == 0
        for slot in set(range(6)) - {victim}:
            assert result.token_ids[slot] == expected.token_ids[slot]
            assert result.logprobs.get(slot) == expected.logprobs.get(slot)


def test_all_negative_infinity_is_a_failure() -> None:
    """A row whose every logit is -inf has no distribution."""
    bench = Bench(VOCAB)
    bench.start(0, SamplingParams())
    assert bench.sample(torch.full((1, VOCAB), -torch.inf), [0]).failed == {0: NOT_FINITE}


def sequence(bench: Bench, table: torch.Tensor, slot: int, others: list[int], steps: int = 20) -> list[int]:
    """Tokens of `slot` over some steps of a made-up model: the next logits are a row of `table` by position."""
    found = []
    for step in range(steps):
        slots = [*others[: len(others) // 2], slot, *others[len(others) // 2 :]]
        tokens = bench.advance(table[step].expand(len(slots), -1), slots)
        found.append(tokens[slots.index(slot)])
    return found


def test_seeded_output_ignores_neighbours() -> None:
    """B064: the same key gives the same tokens alone, with 1 and with 7 neighbours, whatever they ask for."""
    table = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(9)) * 2
    results = []
    for count in (0, 1, 7):
        bench = Bench(VOCAB)
        bench.start(5, SamplingParams(seed=42, temperature=0.8), key=42)
        for slot in range(10, 10 + count):
            bench.start(slot, SamplingParams(temperature=0.8, top_k=slot, logprobs=slot % 5), key=slot * 31)
        results.append(sequence(bench, table, 5, list(range(10, 10 + count))))
    assert results[0] == results[1] == results[2]


def test_keys_make_different_sequences() -> None:
    """B065, B071: other keys (children of one seed, unseeded requests) give other tokens, each reproducible."""
    table = torch.randn(20, VOCAB, generator=torch.Generator().manual_seed(9))
    found = []
    for key in (7, 8, 2**62, 7):
        bench = Bench(VOCAB)
        bench.start(0, SamplingParams(), key=key)
        found.append(tuple(sequence(bench, table, 0, [])))
    assert found[0] == found[3] and len(set(found)) == 3
