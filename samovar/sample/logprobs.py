"""Logprobs of the raw model distribution: log-softmax of the logits before temperature, penalties and masks.

Order among equal logits is defined: the smaller id first. The rank of a token is one more than the number of tokens with
a strictly larger logit.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.core.outputs import TokenLogprobs


def token_logprobs(logits: torch.Tensor, chosen: torch.Tensor, counts: NDArray[np.int64]) -> list[TokenLogprobs]:
    """One entry per row: the chosen token, then the `counts[row]` most probable ones.

    logits [rows, vocab], float32, unprocessed; chosen int64 [rows]; counts in 0..vocab.
    """
    total = logits.logsumexp(-1, keepdim=True)
    own = logits.gather(1, chosen[:, None])
    own_logprobs, own_ids = (own - total).squeeze(1).tolist(), chosen.tolist()
    ids, values = best(logits, max(int(counts.max(initial=0)), 1))
    ranks = _ranks(logits, own, values).tolist()
    top_ids, top_logprobs = ids.tolist(), (values - total).tolist()
    return [
        TokenLogprobs([own_ids[i], *top_ids[i][:k]], [own_logprobs[i], *top_logprobs[i][:k]], ranks[i])
        for i, k in enumerate(counts.tolist())
    ]


def _ranks(logits: torch.Tensor, own: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """1 + the number of logits above `own` [rows, 1]; the whole row is searched only if its best `values` do not tell."""
    ranks = (values > own).sum(-1) + 1
    is_below = own.squeeze(1) < values[:, -1]
    if is_below.any():
        ranks[is_below] = (logits[is_below] > own[is_below]).sum(-1) + 1
    return ranks


def best(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` (at least 1) largest of each row as (ids, values), both [rows, count], equal values by ascending id."""
    vocab = logits.shape[1]
    if count > vocab // 4:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return ids[:, :count], values[:, :count]
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
