"""The table of settings that kernels read, which rows it suffices for, and launches that wait for nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from samovar.core.sampling_params import SamplingParams
from samovar.core.step import SlotStart
from samovar.kernels.sample_tokens.settings import SLOT_SETTINGS, greedy
from samovar.sample import logprobs, pipeline, sampler
from samovar.sample import state as state_module
from samovar.sample.pipeline import SampleRows
from samovar.sample.sampler import ALL_FORBIDDEN, FAILURES, NOT_FINITE, Sampler
from samovar.sample.state import SamplingState

VOCAB = 40


def started(state: SamplingState, slot: int, **setting: Any) -> None:
    state.start(SlotStart(slot, SamplingParams(**setting), [1, 2, 3], 3, [7], 2**64 - 5))


def read(settings: torch.Tensor) -> np.ndarray:
    return settings.numpy().view(SLOT_SETTINGS)[:, 0]


def test_the_table_holds_what_was_asked() -> None:
    """Each number of a slot, the key's 64 bits, and a greedy dummy behind the slots."""
    state = SamplingState(3, VOCAB, 16)
    started(state, 1, temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    started(state, 2, temperature=0, top_k=5, top_p=0.9, min_p=0.1)
    rows = read(state.settings)
    assert rows[1]["scale"] == 1 / np.float32(0.7) and rows[1]["top_p"] == 0.9
    assert (rows[1]["top_k"], rows[1]["key"], rows[1]["margin"]) == (5, 2**64 - 5, np.float32(np.log(0.1)))
    assert rows[2]["scale"] == 0 and rows[2]["top_k"] == 0
    assert rows[0] == rows[3] == greedy(1)[0]
    started(state, 1, top_k=VOCAB)
    assert rows[1]["top_k"] == 0 and rows[1]["scale"] == 1


def test_changes_reach_a_device_with_flush() -> None:
    """A device of its own sees slots started since the last call, and only then."""
    state, far = SamplingState(3, VOCAB, 16), torch.device("meta")
    state.settings = state.settings.clone()
    state.device = far  # Not the CPU: changes are collected.
    started(state, 0, temperature=0.5)
    started(state, 2, top_p=0.5)
    assert read(state.settings)[0]["scale"] == 0
    state.device = torch.device("cpu")
    state.flush()
    assert read(state.settings)[[0, 2]]["scale"].tolist() == [2, 1] and read(state.settings)[2]["top_p"] == 0.5
    started(state, 1, temperature=0.5)
    assert read(state.settings)[1]["scale"] == 0  # The table in this test is a copy, and the CPU needs no flush.


@pytest.mark.parametrize(
    ("setting", "is_plain"),
    [
        ({}, True),
        ({"temperature": 0}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 4}, True),
        ({"logprobs": 0}, False),
        ({"presence_penalty": 0.1}, False),
        ({"logit_bias": {1: 1.0}}, False),
        ({"min_tokens": 2}, False),
        ({"bad_words_token_ids": [[1, 2]]}, False),
        ({"allowed_token_ids": [1]}, False),
    ],
    ids=str,
)
def test_which_rows_are_plain(setting: dict[str, Any], is_plain: bool) -> None:
    state = SamplingState(3, VOCAB, 16)
    started(state, 0)
    started(state, 1, **setting)
    assert state.is_plain(np.array([0, 1])) is is_plain and state.is_plain(np.array([0, 2]))
    state.free(1)
    started(state, 1)
    assert state.is_plain(np.array([0, 1]))


def test_pending_tokens_are_ids_or_reasons() -> None:
    """Before `collect`, failures stand as negative ids; after it, as 0 and words; `last_sampled` never holds them."""
    state = SamplingState(4, VOCAB, 16)
    started(state, 0, temperature=0)
    started(state, 1)
    started(state, 2, allowed_token_ids=[4], bad_words_token_ids=[[4]])
    started(state, 3, temperature=0, logit_bias={9: 50.0}, logprobs=1)
    logits = torch.randn(4, VOCAB)
    logits[1, 5] = torch.nan
    state.last_sampled.fill_(33)
    pending = Sampler(state).launch(logits, SampleRows(np.arange(4), np.full(4, 3)))
    assert pending.token_ids.tolist() == [int(logits[0].argmax()), -1, -2, 9]
    assert [FAILURES[i] for i in (-1, -2)] == [NOT_FINITE, ALL_FORBIDDEN]
    assert state.last_sampled[[0, 1, 2, 3]].tolist() == [int(logits[0].argmax()), 0, 0, 9]
    rows = pending.collect()
    assert rows.token_ids.tolist() == [int(logits[0].argmax()), 0, 0, 9]
    assert rows.failed == {1: NOT_FINITE, 2: ALL_FORBIDDEN} and rows.logprobs.keys() == {3}


def test_a_launch_never_looks_at_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """On tensors without memory every read of a value raises: a whole step of every rule at once goes through."""
    for module in (pipeline, sampler, state_module):
        monkeypatch.setattr(module, "upload", lambda array, device: torch.from_numpy(array).to(device))
    for module in (logprobs, sampler):
        monkeypatch.setattr(module, "download", lambda tensor: tensor)
    monkeypatch.setattr(sampler, "mark", lambda device: None)
    rules: list[dict[str, Any]] = [
        {},
        {"temperature": 0, "logprobs": 5},
        {"allowed_token_ids": [1, 2], "logprobs": 0},
        {"bad_words_token_ids": [[3], [1, 2, 3]]},
        {"logit_bias": {1: 2.0}, "min_tokens": 3, "logprobs": -1},
        {"repetition_penalty": 2.0, "presence_penalty": 1.0, "frequency_penalty": 1.0, "top_k": 3},
    ]
    state = SamplingState(6, VOCAB, 16, "meta")
    for slot, rule in enumerate(rules):
        started(state, slot, **rule)
    with pytest.raises((NotImplementedError, RuntimeError)):
        Sampler(state).launch(torch.empty(6, VOCAB, device="meta"), SampleRows(np.arange(6), np.full(6, 5)))
    drawing = Sampler(state, lambda logits, settings, slots, positions, last: last.new_empty(len(logits)))
    for chosen in ([0], [1], [0, 5], [5], [0, 1, 2, 3, 4, 5]):
        rows = SampleRows(np.array(chosen), np.full(len(chosen), 5))
        pending = drawing.launch(torch.empty(len(chosen), VOCAB, device="meta"), rows)
        state.append(rows.slots, rows.positions, pending.token_ids)
        assert pending.token_ids.shape == (len(chosen),)
