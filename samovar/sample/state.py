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
from samovar.core.step import SlotStart, TokenMasks
from samovar.kernels.sample_tokens.settings import COLUMNS, greedy, make
from samovar.sample.transfer import upload

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
    """Settings of every slot; arrays are [num_slots]. `rules` holds the slots that have any, the others pay nothing.
    Only the masks of constrained sequences belong to a step: `has_mask` and `mask_words` int32 [masks, vocab / 32].

    On the device are, one row for each slot and one more for `num_slots`, the greedy slot of padding rows: `settings`
    int64 [num_slots + 1, 5], the bits of `SLOT_SETTINGS`, up to date after `flush`; `last_sampled` int64 [num_slots + 1].
    """

    def __init__(self, num_slots: int, vocab_size: int, max_model_len: int, device: torch.device | str = "cpu") -> None:
        self.num_slots, self.vocab_size, self.device = num_slots, vocab_size, torch.device(device)
        self.rules: dict[int, SlotRules] = {}
        self._table = greedy(num_slots + 1)
        self._bits = self._table.view(np.int64).reshape(num_slots + 1, COLUMNS)
        self._stale: set[int] = set()
        # On a CPU this is the table itself.
        self.settings = torch.from_numpy(self._bits).to(self.device)
        self.last_sampled = torch.zeros(num_slots + 1, dtype=torch.int64, device=self.device)
        # Uninitialised on purpose: rows of slots that never need a history are never touched and cost no memory.
        self.history = torch.empty((num_slots, max_model_len + SPARE_TOKENS), dtype=torch.int32, device=self.device)
        self.repetition = np.ones(num_slots, np.float32)
        self.presence = np.zeros(num_slots, np.float32)
        self.frequency = np.zeros(num_slots, np.float32)
        self.num_prompt_tokens = np.zeros(num_slots, np.int64)
        self.min_tokens = np.zeros(num_slots, np.int64)
        self.num_logprobs = np.full(num_slots, -1, np.int64)  # alternatives per token; -1 for no logprobs at all
        self.has_rules = np.zeros(num_slots, bool)
        self.has_penalties = np.zeros(num_slots, bool)
        self.has_history = np.zeros(num_slots, bool)
        self.has_mask = np.zeros(num_slots, bool)
        self.mask_words = np.zeros((0, -(-vocab_size // 32)), np.int32)
        self._mask_rows = np.zeros(num_slots, np.int64)

    def start(self, start: SlotStart) -> None:
        """Take over a slot for a new or resumed sequence. Raises `ValueError` if its history does not fit."""
        slot, params = start.slot, start.params
        if len(start.token_ids) > self.history.shape[1]:
            raise ValueError(f"{len(start.token_ids)} tokens do not fit a history of {self.history.shape[1]}")
        self._set_numbers(slot, params, start.sampling_key)
        self.num_prompt_tokens[slot] = start.num_prompt_tokens
        rules = self._read_rules(params, start.stop_token_ids)
        self.has_rules[slot] = rules is not None
        if rules is not None:
            self.rules[slot] = rules
        self.has_penalties[slot] = params.has_penalties
        self.has_history[slot] = params.has_penalties or (rules is not None and len(rules.word_ends) > 0)
        if self.has_history[slot]:
            # Ids beyond 32 bits must meet the bounds before they lose their upper half.
            ids = np.array(start.token_ids, np.int64).clip(0, self.vocab_size - 1).astype(np.int32)
            self.history[slot, : len(ids)] = upload(ids, self.device)

    def free(self, slot: int) -> None:
        """Forget the lists of a slot that its sequence gave up."""
        self.rules.pop(slot, None)
        self.has_rules[slot] = self.has_penalties[slot] = self.has_history[slot] = False

    def mask(self, masks: TokenMasks | None) -> None:
        """Take over the masks of a step, in place of those of the step before. Raises `ValueError` for another vocabulary."""
        self.has_mask[:] = False
        if masks is None:
            return
        if masks.words.shape != (len(masks.slots), self.mask_words.shape[1]):
            raise ValueError(f"masks of shape {masks.words.shape} for {len(masks.slots)} sequences do not fit")
        self.has_mask[masks.slots] = True
        self._mask_rows[masks.slots] = np.arange(len(masks.slots))
        self.mask_words = masks.words

    def masks_of(self, slots: Ids) -> NDArray[np.int32]:
        """The words of slots that have masks, [slots, words]."""
        return self.mask_words[self._mask_rows[slots]]

    def append(self, slots: Ids, positions: Ids, token_ids: torch.Tensor) -> None:
        """Write sampled `token_ids` [rows] (0 where they are negative) at `positions` of the slots with a history."""
        rows = np.flatnonzero(self.has_history[slots])
        if len(rows):
            index = upload(np.stack((slots[rows], positions[rows], rows)), self.device)
            self.history[index[0], index[1]] = token_ids[index[2]].clamp(min=0).to(torch.int32)

    def flush(self) -> None:
        """Bring `settings` up to date for every slot started since the last call: one copy, not waited for."""
        if not self._stale:
            return
        slots = np.fromiter(self._stale, np.int64, len(self._stale))
        self._stale.clear()
        packed = upload(np.concatenate((slots[:, None], self._bits[slots]), axis=1), self.device)
        self.settings.index_copy_(0, packed[:, 0], packed[:, 1:])

    def is_plain(self, slots: Ids) -> bool:
        """Whether the op `sample_tokens` does all that these rows ask for: no rules, penalties, masks or logprobs."""
        asks = self.has_rules[slots] | self.has_penalties[slots] | self.has_mask[slots]
        return not (asks | (self.num_logprobs[slots] >= 0)).any()

    def is_greedy(self, slots: Ids) -> bool:
        """Whether all these rows want is the most likely token."""
        return self.is_plain(slots) and not self._table["scale"][slots].any()

    def _set_numbers(self, slot: int, params: SamplingParams, key: int) -> None:
        vocab = self.vocab_size
        top_k = params.top_k if 0 < params.top_k < vocab else 0
        self._table[slot] = make(params.effective_temperature, top_k, params.top_p, params.min_p, key)
        if self.device.type != "cpu":
            self._stale.add(slot)
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
