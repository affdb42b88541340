"""The ordered logits processors: what may be sampled at all, and with which weight, before temperature.

Each processor changes the rows that ask for it, all of them at once, and finds them by their slots; rows that ask for
nothing are not touched. The order is that of `PROCESSORS`, vLLM's: allowed ids, bad words, minimum length, bias, penalties;
then what constraints allow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from samovar.sample.state import WILDCARD, Ids, SamplingState, SlotRules
from samovar.sample.transfer import upload


@dataclass(frozen=True, slots=True)
class SampleRows:
    """Which sequences the rows of a logits tensor belong to; both int64 [rows].

    `positions` is the index that the sampled token will have in its sequence.
    """

    slots: Ids
    positions: Ids

    def pick(self, rows: Ids) -> SampleRows:
        """Some of the rows."""
        return SampleRows(self.slots[rows], self.positions[rows])


Processor = Callable[[torch.Tensor, SampleRows, SamplingState], None]


def process(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Run every processor over `logits` [rows, vocab], float32, in place."""
    for processor in PROCESSORS:
        processor(logits, rows, state)


def needs_processing(rows: SampleRows, state: SamplingState) -> Ids:
    """Rows whose logits some processor would change."""
    slots = rows.slots
    return np.flatnonzero(state.has_rules[slots] | state.has_penalties[slots] | state.has_mask[slots])


def keep_allowed(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Forbid every id that is not in `allowed_token_ids`."""
    found = [(row, rules.allowed) for row, rules in _ruled(rows, state) if rules.allowed is not None]
    if not found:
        return
    row_ids, token_ids = _pairs(found, logits.device)
    kept = logits[row_ids, token_ids]
    logits[upload(np.array([row for row, _ in found]), logits.device)] = -torch.inf
    logits[row_ids, token_ids] = kept


def add_bias(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Add `logit_bias`."""
    found = [(row, rules) for row, rules in _ruled(rows, state) if len(rules.bias_ids)]
    if not found:
        return
    row_ids, token_ids = _pairs([(row, rules.bias_ids) for row, rules in found], logits.device)
    logits[row_ids, token_ids] += upload(np.concatenate([rules.bias_values for _, rules in found]), logits.device)


def mask_bad_words(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Forbid bad words of one token, and the last token of longer ones whose beginning was just generated."""
    single = [(row, rules.banned) for row, rules in _ruled(rows, state) if len(rules.banned)]
    if single:
        logits[_pairs(single, logits.device)] = -torch.inf
    long = [(row, rules) for row, rules in _ruled(rows, state) if len(rules.word_ends)]
    if long:
        _mask_long_words(logits, rows, state, long)


def _mask_long_words(
    logits: torch.Tensor, rows: SampleRows, state: SamplingState, found: list[tuple[int, SlotRules]]
) -> None:
    width = max(rules.word_prefixes.shape[1] for _, rules in found)
    padded = [
        np.pad(r.word_prefixes, ((0, 0), (width - r.word_prefixes.shape[1], 0)), constant_values=WILDCARD)
        for _, r in found
    ]
    prefixes = upload(np.concatenate(padded), logits.device)
    owners = np.repeat([row for row, _ in found], [len(r.word_ends) for _, r in found])
    columns = rows.positions[owners][:, None] - width + np.arange(width)
    generated = upload(columns >= state.num_prompt_tokens[rows.slots[owners]][:, None], logits.device)
    slots = upload(rows.slots[owners], logits.device)
    tails = state.history[slots[:, None], upload(columns.clip(0), logits.device)]
    matches = ((prefixes == WILDCARD) | (generated & (prefixes == tails))).all(-1)
    ends = upload(np.concatenate([rules.word_ends for _, rules in found]), logits.device)
    penalty = torch.zeros(len(owners), device=logits.device).masked_fill_(matches, -torch.inf)
    logits.index_put_((upload(owners, logits.device), ends), penalty, accumulate=True)


def mask_stops(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Forbid eos and stop ids while fewer than `min_tokens` tokens were generated."""
    is_short = rows.positions - state.num_prompt_tokens[rows.slots] < state.min_tokens[rows.slots]
    found = [(row, rules.stops) for row, rules in _ruled(rows, state) if is_short[row] and len(rules.stops)]
    if found:
        logits[_pairs(found, logits.device)] = -torch.inf


def apply_penalties(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Repetition (CTRL, Keskar et al. 2019) over prompt and output; then frequency and presence over the output only.

    Works on the ids that occurred, not on the vocabulary: an id that occurs twice writes the same value twice.
    """
    chosen = np.flatnonzero(state.has_penalties[rows.slots])
    if not len(chosen):
        return
    is_all = len(chosen) == len(rows.slots)
    index = upload(chosen, logits.device)
    part = logits if is_all else logits[index]
    picked = rows.pick(chosen)
    _penalize(part, picked, state)
    if not is_all:
        logits[index] = part


def _penalize(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    device, slots = logits.device, rows.slots
    length = int(rows.positions.max())
    # Past a row's own tokens there is whatever the memory held; clamped, it is an index like any other, and unused.
    history = state.history[:, :length][upload(slots, device)].long().clamp_(0, state.vocab_size - 1)
    column, first = np.arange(length), state.num_prompt_tokens[slots]
    is_token = upload(column < rows.positions[:, None], device)
    repetition = upload(state.repetition[slots][:, None], device)
    seen = history.where(is_token, history[:, :1])
    values = logits.gather(1, seen)
    logits.scatter_(1, seen, torch.where(values > 0, values / repetition, values * repetition))
    has_output = rows.positions > first
    if not has_output.any():
        return
    # Padding repeats an id of the output, so that it writes what the id itself writes; rows without output change by 0.
    filler = history.gather(1, upload(np.where(has_output, first, 0)[:, None], device))
    is_output = is_token & upload(column >= first[:, None], device)
    generated = history.where(is_output, filler)
    logits.scatter_add_(1, generated, is_output * -upload(state.frequency[slots][:, None], device))
    presence = upload((state.presence[slots] * has_output)[:, None], device)
    logits.scatter_(1, generated, logits.gather(1, generated) - presence)


def apply_masks(logits: torch.Tensor, rows: SampleRows, state: SamplingState) -> None:
    """Forbid what the masks of constrained sequences do not allow: two bytes a logit for a moment."""
    chosen = np.flatnonzero(state.has_mask[rows.slots])
    if not len(chosen):
        return
    device = logits.device
    octets = upload(state.masks_of(rows.slots[chosen]), device).view(torch.uint8).long()
    allowed = _octets(device)[octets].view(torch.bool)[:, : logits.shape[1]]
    if len(chosen) == len(logits):
        logits.masked_fill_(~allowed, -torch.inf)
    else:
        index = upload(chosen, device)
        logits[index] = logits[index].masked_fill_(~allowed, -torch.inf)


@cache
def _octets(device: torch.device) -> torch.Tensor:
    """Eight bits -> eight bytes of 0 or 1, the lowest bit first, as one integer each; int64 [256]."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return upload(bits.view("<i8").ravel().astype(np.int64), device)


PROCESSORS: tuple[Processor, ...] = (keep_allowed, mask_bad_words, mask_stops, add_bias, apply_penalties, apply_masks)
"""In this order. A forbidden id (-inf) stays forbidden whatever follows."""


def _ruled(rows: SampleRows, state: SamplingState) -> list[tuple[int, SlotRules]]:
    return [(int(row), state.rules[int(rows.slots[row])]) for row in np.flatnonzero(state.has_rules[rows.slots])]


def _pairs(found: list[tuple[int, Ids]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[(row, ids)] -> (row of every id, ids), flat."""
    row_ids = np.repeat([row for row, _ in found], [len(ids) for _, ids in found])
    return upload(row_ids, device), upload(np.concatenate([ids for _, ids in found]), device)
