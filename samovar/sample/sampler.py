"""Sampler: logits of many rows -> one token each, with logprobs. Greedy rows cost one argmax and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from samovar.core.outputs import TokenLogprobs
from samovar.sample.logprobs import token_logprobs
from samovar.sample.pipeline import SampleRows, needs_processing, process
from samovar.sample.random_numbers import uniforms
from samovar.sample.state import Ids, SamplingState
from samovar.sample.truncation import BLOCK, cumulative_blocks, thresholds, weights

NOT_FINITE = "the model produced logits that are not finite for this sequence"
ALL_FORBIDDEN = "no token can be sampled: allowed_token_ids, bad_words, logit_bias and min_tokens together forbid all"


@dataclass(slots=True)
class SampledRows:
    """`token_ids` int64 [rows], on the device; 0 in the rows of `failed` (row -> message)."""

    token_ids: torch.Tensor
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


class Sampler:
    """Draws tokens by the settings in `state`. A row's token is a function of its own logits, settings and key."""

    def __init__(self, state: SamplingState) -> None:
        self.state = state

    def sample(self, logits: torch.Tensor, rows: SampleRows) -> SampledRows:
        """logits [rows, vocab], float32, left unchanged except that rows which are not finite become zeros.

        A row that fails is reported and cannot change another.
        """
        state, failed = self.state, dict[int, str]()
        highest, token_ids = logits.max(-1)
        self._fail(failed, highest, NOT_FINITE)
        if failed:
            logits[list(failed)] = 0.0
        work = logits
        if (changed := needs_processing(rows, state)).size:
            index = torch.from_numpy(changed).to(logits.device)
            part = logits[index]
            process(part, rows.pick(changed), state)
            highest, token_ids[index] = part.max(-1)
            self._fail(failed, highest, ALL_FORBIDDEN, changed)
            if len(failed):
                part[~highest.isfinite()] = 0.0
            if len(changed) == len(logits):
                work = part
            elif (state.temperature[rows.slots[changed]] > 0).any():
                work = logits.clone()
                work[index] = part
        if (drawn := np.flatnonzero(state.temperature[rows.slots] > 0)).size:
            index = torch.from_numpy(drawn).to(logits.device)
            token_ids[index] = self._draw(work if len(drawn) == len(work) else work[index], rows.pick(drawn))
        if failed:
            token_ids[list(failed)] = 0
        return SampledRows(token_ids, self._logprobs(logits, rows, token_ids, failed), failed)

    def _draw(self, logits: torch.Tensor, rows: SampleRows) -> torch.Tensor:
        """One token of each row by inverting its cumulative distribution: one random number a row, ids in their order."""
        state, slots, device = self.state, rows.slots, logits.device
        # Multiplying by the reciprocal takes a third of a division's time on a CPU.
        scores = logits * torch.from_numpy(1 / state.temperature[slots][:, None]).to(device)
        highest, floor = scores.amax(-1, keepdim=True), None
        if state.is_truncated[slots].any():
            floor = thresholds(scores, highest, state.top_k[slots], state.top_p[slots], state.min_p[slots])
        mass = weights(scores, highest, floor)
        del scores  # As large as the logits; the plan counts on its end.
        totals = cumulative_blocks(mass)
        points = torch.from_numpy(uniforms(state.keys[slots], rows.positions)[:, None]).to(device) * totals[:, -1:]
        block = torch.searchsorted(totals, points, right=True).clamp_(max=totals.shape[1] - 1)
        points -= totals.gather(1, (block - 1).clamp(min=0)) * (block > 0)
        columns = block * BLOCK + torch.arange(BLOCK, device=device)
        inside = mass.gather(1, columns)
        offset = (inside.cumsum(-1, dtype=torch.float64) <= points).sum(-1)
        # A block's total is rounded, so a point can lie past its last weight: that one is meant.
        last = BLOCK - 1 - (inside > 0).flip(-1).to(torch.int8).argmax(-1)
        return block.squeeze(1) * BLOCK + torch.minimum(offset, last)

    def _logprobs(
        self, logits: torch.Tensor, rows: SampleRows, token_ids: torch.Tensor, failed: dict[int, str]
    ) -> dict[int, TokenLogprobs]:
        counts = self.state.num_logprobs[rows.slots]
        wanted = np.flatnonzero(counts >= 0)
        if not wanted.size:
            return {}
        index = torch.from_numpy(wanted).to(logits.device)
        part = logits if len(wanted) == len(logits) else logits[index]
        entries = token_logprobs(part, token_ids[index], counts[wanted])
        return {int(row): entry for row, entry in zip(wanted, entries, strict=True) if int(row) not in failed}

    @staticmethod
    def _fail(failed: dict[int, str], highest: torch.Tensor, message: str, rows: Ids | None = None) -> None:
        """Note the rows whose largest value is NaN or infinite: NaN, an infinite logit, or nothing left to sample."""
        is_bad = ~highest.isfinite()
        if is_bad.any():
            for row in is_bad.nonzero().squeeze(1).tolist():
                failed.setdefault(int(row if rows is None else rows[row]), message)
