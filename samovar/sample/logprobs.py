"""Logprobs of the raw model distribution: log-softmax of the logits before temperature, penalties and masks.

Order among equal logits is defined: the smaller id first. The rank of a token is one more than the number of tokens with
a strictly larger logit.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.core.outputs import TokenLogprobs
from samovar.sample.transfer import download


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Figures of some rows, on the device that computed them or, once downloaded, on the host.

    `chosen` (int64), `chosen_logprobs`, `ranks` (int64), `is_finite` (bool: whether the row has a distribution) are
    [rows]; `ids` (int64) and `logprobs` [rows, most] are the most probable tokens.
    """

    chosen: torch.Tensor
    chosen_logprobs: torch.Tensor
    ranks: torch.Tensor
    is_finite: torch.Tensor
    ids: torch.Tensor
    logprobs: torch.Tensor

    def download(self) -> LogprobTensors:
        """Copies on the host, valid once an event recorded after this call has happened."""
        return LogprobTensors(
            download(self.chosen),
            download(self.chosen_logprobs),
            download(self.ranks),
            download(self.is_finite),
            download(self.ids),
            download(self.logprobs),
        )

    def entries(self, counts: NDArray[np.int64]) -> list[TokenLogprobs]:
        """One entry per row: the chosen token, then the `counts[row]` most probable ones. Waits, unless on the host."""
        chosen, own, ranks = self.chosen.tolist(), self.chosen_logprobs.tolist(), self.ranks.tolist()
        ids, logprobs = self.ids.tolist(), self.logprobs.tolist()
        return [
            TokenLogprobs([chosen[i], *ids[i][:k]], [own[i], *logprobs[i][:k]], ranks[i])
            for i, k in enumerate(counts.tolist())
        ]


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, counts: NDArray[np.int64]) -> list[TokenLogprobs]:
    """One entry per row: the chosen token, then the `counts[row]` most probable ones.

    logits [rows, vocab], float32, unprocessed; chosen int64 [rows]; counts in 0..vocab.
    """
    return measure(logits, chosen, int(counts.max(initial=0))).entries(counts)


def measure(logits: torch.Tensor, chosen: torch.Tensor, most: int) -> LogprobTensors:
    """Queue what entries with up to `most` alternatives need; arguments as for `token_logprobs`."""
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, chosen[:, None])
    ids, values = best(logits, max(most, 1))
    ranks = _ranks(logits, own, values)
    return LogprobTensors(
        chosen, (own - total).squeeze(1), ranks, total.squeeze(1).isfinite(), ids[:, :most], (values - total)[:, :most]
    )


def _ranks(logits: torch.Tensor, own: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """1 + the number of logits above `own` [rows, 1]; a CPU searches a whole row only if its best `values` do not tell."""
    if logits.device.type != "cpu":
        return (logits > own).sum(-1) + 1
    ranks = (values > own).sum(-1) + 1
    is_below = own.squeeze(1) < values[:, -1]
    if is_below.any():
        ranks[is_below] = (logits[is_below] > own[is_below]).sum(-1) + 1
    return ranks


def best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` (at least 1) largest of each row as (ids, values), both [rows, count], equal values by ascending id."""
    if count > logits.shape[1] // 4:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return ids[:, :count], values[:, :count]
    return _best_on_cpu(logits, count) if logits.device.type == "cpu" else best_by_key(logits, count)


def best_by_key(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`best` without looking at a value: each logit and its id become one integer, and no two of those are equal."""
    bits = (logits + 0.0).view(torch.int32)  # The sum turns -0 into 0: equal numbers need equal bits.
    # Bits of negative floats count downwards.
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    backwards = torch.arange(logits.shape[1] - 1, -1, -1, device=logits.device)
    ids = logits.shape[1] - 1 - (((order << 32) | backwards).topk(count, dim=-1).values & 0xFFFFFFFF)
    return ids, logits.gather(1, ids)


def _best_on_cpu(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`best` where looking at a value costs nothing: three to thirteen times as fast as by keys there."""
    values, ids = logits.topk(count + 1, dim=-1)
    # topk may take any of several equal values at the border: rows where that happens choose again, by id.
    is_torn = values[:, -2] == values[:, -1]
    values, ids = values[:, :-1].clone(), ids[:, :-1].clone()
    for row in is_torn.nonzero().squeeze(1).tolist():
        border = values[row, -1]
        above, equal = (logits[row] > border).nonzero().squeeze(1), (logits[row] == border).nonzero().squeeze(1)
        ids[row] = torch.cat((above, equal))[:count]
        values[row] = logits[row, ids[row]]
    ids, order = ids.sort(dim=-1)
    values, again = values.gather(1, order).sort(dim=-1, descending=True, stable=True)
    return ids.gather(1, again), values
