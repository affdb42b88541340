"""Draw one token for each row of logits, by settings that lie on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from samovar.kernels.op import op
from samovar.kernels.sample_tokens.random_numbers import uniforms
from samovar.kernels.sample_tokens.settings import SLOT_SETTINGS, greedy, make
from samovar.kernels.sample_tokens.truncation import BLOCK, cumulative_blocks, thresholds, weights

NOT_FINITE = -1
"""Instead of a token: the row's largest logit is NaN or infinite."""


@op(prefer=("triton",), mutates=("last_sampled",), plain_is_best=("cpu",))
def sample_tokens(
    logits: torch.Tensor,
    settings: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    last_sampled: torch.Tensor,
) -> torch.Tensor:
    """Token ids, int64 [rows], `NOT_FINITE` in rows that have no distribution; also written to last_sampled[slots].

    logits [rows, vocab], float32, left as they are; settings int64 [slots, columns], the bits of `SLOT_SETTINGS`; slots
    int32 [rows] into it; positions int32 [rows], the index that the token will have in its sequence; last_sampled int64
    [slots], which gets 0 where there is no token. A row's token is a function of its own logits, settings and position.
    """
    highest, token_ids = logits.max(-1)
    is_finite = np.isfinite(highest.float().cpu().numpy())
    picked = settings.cpu().numpy()[slots.cpu().numpy()].view(SLOT_SETTINGS).ravel()
    if (rows := np.flatnonzero((picked["scale"] > 0) & is_finite)).size:
        chosen = torch.from_numpy(rows).to(logits.device)
        part = logits if len(rows) == len(logits) else logits[chosen]
        token_ids[chosen] = _draw(part.float(), picked[rows], positions.cpu().numpy()[rows])
    if not is_finite.all():
        token_ids[torch.from_numpy(~is_finite).to(logits.device)] = NOT_FINITE
    last_sampled.index_copy_(0, slots.long(), token_ids.clamp(min=0))
    return token_ids


def _draw(logits: torch.Tensor, picked: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """One token of each row by inverting its cumulative distribution: one random number a row, ids in their order."""
    device = logits.device
    # Multiplying by the reciprocal takes a third of a division's time on a CPU.
    scores = logits * torch.from_numpy(picked["scale"][:, None].astype(np.float32)).to(device)
    highest, floor = scores.amax(-1, keepdim=True), None
    margin, top_k, top_p = picked["margin"], picked["top_k"], picked["top_p"]
    if ((margin > -np.inf) | (top_k > 0) | (top_p < 1)).any():
        floor = thresholds(scores, highest, margin, top_k, top_p)
    mass = weights(scores, highest, floor)
    del scores  # As large as the logits; the plan counts on its end.
    totals = cumulative_blocks(mass)
    points = torch.from_numpy(uniforms(picked["key"], positions)[:, None]).to(device) * totals[:, -1:]
    block = torch.searchsorted(totals, points, right=True).clamp_(max=totals.shape[1] - 1)
    points -= totals.gather(1, (block - 1).clamp(min=0)) * (block > 0)
    columns = block * BLOCK + torch.arange(BLOCK, device=device)
    inside = mass.gather(1, columns)
    offset = (inside.cumsum(-1, dtype=torch.float64) <= points).sum(-1)
    # A block's total is rounded, so a point can lie past its last weight: that one is meant.
    last = BLOCK - 1 - (inside > 0).flip(-1).to(torch.int8).argmax(-1)
    return block.squeeze(1) * BLOCK + torch.minimum(offset, last)


@sample_tokens.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    kinds = [
        make(0.0),
        make(1.0),
        make(0.7, top_k=3),
        make(1.3, top_p=0.8),
        make(1.0, min_p=0.1),
        make(0.9, 9, 0.9, 0.01),
    ]
    for rows, vocab in ((7, 500), (1, 129), (12, 1000)):
        table = greedy(13)
        for slot in range(12):
            table[slot] = kinds[slot % len(kinds)]
            table[slot]["key"] = slot * 7919
        settings = torch.from_numpy(table.view(np.int64).reshape(13, -1))
        slots = torch.randperm(12)[:rows].to(torch.int32)
        yield (
            torch.randn(rows, vocab) * 3,
            settings,
            slots,
            torch.arange(rows, dtype=torch.int32),
            torch.zeros(13, dtype=torch.int64),
        )


# Token ids are equal or wrong.
sample_tokens.tolerance[torch.float32] = (0.0, 0.0)
sample_tokens.tolerance[torch.bfloat16] = (0.0, 0.0)
sample_tokens.tolerance[torch.float16] = (0.0, 0.0)
