"""SamplingState: what the sampler knows about each slot. Set when a sequence takes a slot, never rebuilt per step.

Numbers live in NumPy arrays indexed by slot, so that a step reads them with one indexing operation. Token ids that
penalties and bad words look at live on the device and are appended there by the sampler: nothing waits for the host to
see a token. Ids outside the vocabulary are dropped here, so no row can ever reach into another (front ends refuse them).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.core.sampling_params import SamplingParams
from samovar.core.step import SlotStart
from samovar.sample.random_numbers import key_bits

Ids = NDArray[np.int64]

SPARE_TOKENS = 8
"""Room in a history beyond the context: a token in flight may be sampled past the end, and is then discarded."""

WILDCARD = -1
"""In the prefix of a bad word: any token."""


@dataclass(frozen=True, slots=True)
class SlotRules:
    """Lists of one slot that change single logits; empty arrays where there is nothing."""

    bias_ids: Ids
    bias_values: NDArray[np.float32]
    banned: Ids
    """Bad words of one token."""
    stops: Ids
    """Ids masked while fewer than `min_tokens` tokens were generated."""
    word_prefixes: Ids
    """Bad words of several tokens without their last one, [words, longest], right-aligned, `WILDCARD` before."""
    word_ends: Ids
    """Their last tokens."""
    allowed: Ids | None = None


class SamplingState:
    """Settings of every slot; arrays are [num_slots]. `rules` holds the slots that have any, the others pay nothing."""

    def __init__(self, num_slots: int, vocab_size: int, max_model_len: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size, self.device = vocab_size, torch.device(device)
        self.rules: dict[int, SlotRules] = {}
        # Uninitialised on purpose: rows of slots that never need a history are never touched and cost no memory.
        self.history = torch.empty((num_slots, max_model_len + SPARE_TOKENS), dtype=torch.int32, device=self.device)
        self.temperature = np.zeros(num_slots, np.float32)  # 0 for greedy
        self.top_k = np.zeros(num_slots, np.int64)  # 0 for off; always below the vocabulary
        self.top_p = np.ones(num_slots, np.float64)
        self.min_p = np.zeros(num_slots, np.float64)
        self.is_truncated = np.zeros(num_slots, bool)  # any of the three is in force
        self.repetition = np.ones(num_slots, np.float32)
        self.presence = np.zeros(num_slots, np.float32)
        self.frequency = np.zeros(num_slots, np.float32)
        self.keys = np.zeros(num_slots, np.uint64)
        self.num_prompt_tokens = np.zeros(num_slots, np.int64)
        self.min_tokens = np.zeros(num_slots, np.int64)
        self.num_logprobs = np.full(num_slots, -1, np.int64)  # alternatives per token; -1 for no logprobs at all
        self.has_rules = np.zeros(num_slots, bool)
        self.has_penalties = np.zeros(num_slots, bool)
        self.has_history = np.zeros(num_slots, bool)

    def start(self, start: SlotStart) -> None:
        """Take over a slot for a new or resumed sequence. Raises `ValueError` if its history does not fit."""
        slot, params = start.slot, start.params
        if len(start.token_ids) > self.history.shape[1]:
            raise ValueError(f"{len(start.token_ids)} tokens do not fit a history of {self.history.shape[1]}")
        self._set_numbers(slot, params)
        self.keys[slot] = key_bits(start.sampling_key)
        self.num_prompt_tokens[slot] = start.num_prompt_tokens
        rules = self._read_rules(params, start.stop_token_ids)
        self.has_rules[slot] = rules is not None
        if rules is not None:
            self.rules[slot] = rules
        self.has_penalties[slot] = params.has_penalties
        self.has_history[slot] = params.has_penalties or (rules is not None and len(rules.word_ends) > 0)
        if self.has_history[slot]:
            ids = torch.tensor(start.token_ids, dtype=torch.int32)
            self.history[slot, : len(ids)] = ids.clamp_(0, self.vocab_size - 1).to(self.device)

    def free(self, slot: int) -> None:
        """Forget the lists of a slot that its sequence gave up."""
        self.rules.pop(slot, None)
        self.has_rules[slot] = self.has_penalties[slot] = self.has_history[slot] = False

    def append(self, slots: Ids, positions: Ids, token_ids: torch.Tensor) -> None:
        """Write sampled `token_ids` [rows] at `positions` of the slots that keep a history."""
        rows = np.flatnonzero(self.has_history[slots])
        if len(rows):
            index = [torch.from_numpy(array[rows]).to(self.device) for array in (slots, positions)]
            self.history[index[0], index[1]] = token_ids[torch.from_numpy(rows).to(self.device)].to(torch.int32)

    def _set_numbers(self, slot: int, params: SamplingParams) -> None:
        vocab, is_greedy = self.vocab_size, params.is_greedy
        self.temperature[slot] = params.effective_temperature
        self.top_k[slot] = params.top_k if 0 < params.top_k < vocab and not is_greedy else 0
        self.top_p[slot] = 1.0 if is_greedy else params.top_p
        self.min_p[slot] = 0.0 if is_greedy else params.min_p
        self.is_truncated[slot] = self.top_k[slot] > 0 or self.top_p[slot] < 1 or self.min_p[slot] > 0
        self.repetition[slot] = params.repetition_penalty
        self.presence[slot] = params.presence_penalty
        self.frequency[slot] = params.frequency_penalty
        self.min_tokens[slot] = params.min_tokens
        self.num_logprobs[slot] = resolve_count(params.logprobs, vocab)

    def _read_rules(self, params: SamplingParams, stop_token_ids: list[int]) -> SlotRules | None:
        words = params.bad_words_token_ids or []
        stops = stop_token_ids if params.min_tokens else []
        if not (params.logit_bias or params.allowed_token_ids is not None or words or stops):
            return None
        bias = {i: v for i, v in (params.logit_bias or {}).items() if 0 <= i < self.vocab_size}
        long_words = [word for word in words if len(word) > 1 and all(0 <= i < self.vocab_size for i in word)]
        longest = max(map(len, long_words), default=1) - 1
        prefixes = np.full((len(long_words), longest), WILDCARD, np.int64)
        for row, word in enumerate(long_words):
            prefixes[row, longest - len(word) + 1 :] = word[:-1]
        allowed = params.allowed_token_ids
        return SlotRules(
            bias_ids=np.fromiter(bias.keys(), np.int64, len(bias)),
            bias_values=np.fromiter(bias.values(), np.float32, len(bias)),
            banned=self._ids(word[0] for word in words if len(word) == 1),
            stops=self._ids(stops),
            word_prefixes=prefixes,
            word_ends=np.array([word[-1] for word in long_words], np.int64),
            allowed=None if allowed is None else self._ids(allowed),
        )

    def _ids(self, ids: Iterable[int]) -> Ids:
        """Distinct ids inside the vocabulary, ascending."""
        return np.array(sorted({i for i in ids if 0 <= i < self.vocab_size}), np.int64)


def resolve_count(logprobs: int | None, vocab_size: int) -> int:
    """How many alternatives a logprobs setting means: -1 for none wanted, at most the vocabulary (which -1 asks for)."""
    if logprobs is None:
        return -1
    return vocab_size if logprobs < 0 else min(logprobs, vocab_size)
