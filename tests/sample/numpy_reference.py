"""What sampling means, one row at a time in float64 NumPy: the oracle of these tests."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.core.sampling_params import SamplingParams
from samovar.core.step import SlotStart
from samovar.sample.pipeline import SampleRows
from samovar.sample.sampler import SampledRows, Sampler
from samovar.sample.state import SamplingState

Row = NDArray[np.float64]


def processed(
    logits: Row, params: SamplingParams, prompt: list[int], output: list[int], stop_ids: list[int] | None = None
) -> Row:
    """Logits after masks, bias and penalties."""
    x = logits.astype(np.float64).copy()
    if params.allowed_token_ids is not None:
        x[np.setdiff1d(np.arange(len(x)), params.allowed_token_ids)] = -np.inf
    for word in params.bad_words_token_ids or []:
        if output[len(output) - len(word) + 1 :] == word[:-1] and len(output) >= len(word) - 1:
            x[word[-1]] = -np.inf
    if len(output) < params.min_tokens:
        x[stop_ids or []] = -np.inf
    for token, value in (params.logit_bias or {}).items():
        x[token] += value
    for token in set(prompt) | set(output):
        x[token] = x[token] / params.repetition_penalty if x[token] > 0 else x[token] * params.repetition_penalty
    for token in set(output):
        x[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return x


def distribution(x: Row, params: SamplingParams) -> Row:
    """Probabilities after temperature, min-p, top-k and top-p; ties at a border are all kept."""
    if params.is_greedy:
        return np.eye(len(x))[int(x.argmax())]
    scores = x / params.effective_temperature
    p = np.exp(scores - scores.max())
    p /= p.sum()
    p[p < params.min_p * p.max()] = 0
    if 0 < params.top_k < len(p):
        p[p < np.sort(p)[-params.top_k]] = 0
    p /= p.sum()
    order = np.sort(p)[::-1]
    reached = int(np.searchsorted(np.cumsum(order), params.top_p * (1 - 1e-12)))
    p[p < order[min(reached, len(p) - 1)]] = 0
    return p / p.sum()


class Bench:
    """A sampling state with its sampler, and one call to start slots and draw."""

    def __init__(self, vocab: int, num_slots: int = 64, max_len: int = 128) -> None:
        self.state = SamplingState(num_slots, vocab, max_len)
        self.sampler = Sampler(self.state)
        self.lengths: dict[int, int] = {}

    def start(
        self,
        slot: int,
        params: SamplingParams,
        prompt: list[int] | None = None,
        output: list[int] | None = None,
        *,
        stop_ids: list[int] | None = None,
        key: int = 0,
    ) -> None:
        prompt = prompt or [0]
        ids = prompt + (output or [])
        self.state.free(slot)
        self.state.start(SlotStart(slot, params, ids, len(prompt), stop_ids or [], key))
        self.lengths[slot] = len(ids)

    def sample(self, logits: torch.Tensor, slots: list[int], positions: list[int] | None = None) -> SampledRows:
        where = positions or [self.lengths[slot] for slot in slots]
        return self.sampler.sample(logits.clone(), SampleRows(np.array(slots), np.array(where)))

    def advance(self, logits: torch.Tensor, slots: list[int]) -> list[int]:
        """Sample and append on the device, as a step does; the host learns the ids only for the test."""
        rows = SampleRows(np.array(slots), np.array([self.lengths[slot] for slot in slots]))
        result = self.sampler.sample(logits.clone(), rows)
        self.state.append(rows.slots, rows.positions, result.token_ids)
        for slot in slots:
            self.lengths[slot] += 1
        return result.token_ids.tolist()
