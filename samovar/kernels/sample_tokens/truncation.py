"""top-k, top-p and min-p as one number per row: the smallest logit that is kept.

All three keep the most probable tokens, so each is a threshold, and ties at the threshold are all kept: which tokens
survive depends on their logits only, never on a sort's mood or on the batch. Applied in vLLM's order, min-p, top-k, top-p,
each on what the one before left. A row is sorted whole only if its nucleus is wider than `NUCLEUS_WIDTH`.

Top-p: Holtzman et al., "The curious case of neural text degeneration", 2020. Min-p: Nguyen et al., "Turning up the heat",
2025.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

BLOCK = 128
"""Weights summed at once when a row's distribution is added up."""

FEW = 1024
"""top_k up to this is looked up for all rows together; larger ones apart, so that they cost the others nothing."""

NUCLEUS_WIDTH = 256
"""How many of the most probable tokens are sorted in search of a nucleus, before the whole row is."""


def thresholds(
    scores: torch.Tensor,
    highest: torch.Tensor,
    margin: NDArray[np.float64],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float64],
) -> torch.Tensor:
    """scores [rows, vocab] (float32, after temperature), their `highest` [rows, 1], settings [rows] (-inf, 0, 1 for off)
    -> smallest kept score [rows, 1]."""
    floor = torch.full((len(scores), 1), -torch.inf, device=scores.device)
    if (rows := np.flatnonzero(margin > -np.inf)).size:
        index = torch.from_numpy(rows).to(scores.device)
        floor[index] = highest[index] + torch.from_numpy(margin[rows][:, None].astype(np.float32)).to(scores.device)
    for rows in (np.flatnonzero((top_k > 0) & (top_k <= FEW)), np.flatnonzero(top_k > FEW)):
        if rows.size:
            index = torch.from_numpy(rows).to(scores.device)
            counts = torch.from_numpy(top_k[rows][:, None]).to(scores.device)
            best = largest(_rows(scores, index), int(top_k[rows].max()))
            floor[index] = torch.maximum(floor[index], best.gather(1, counts - 1))
    if (rows := np.flatnonzero(top_p < 1)).size:
        index = torch.from_numpy(rows).to(scores.device)
        share = torch.from_numpy(top_p[rows][:, None]).to(scores.device)
        floor[index] = _nucleus(_rows(scores, index), highest[index], floor[index], share)
    return floor


def largest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest values of each row, descending, [rows, count]."""
    if scores.device.type != "cpu":
        return scores.topk(count).values
    # NumPy's vectorised partition and sort take a quarter to a fortieth of the time of torch's on a CPU.
    array = scores.numpy()
    if count < array.shape[1]:
        array = np.partition(array, array.shape[1] - count, axis=-1)[:, -count:]
    return torch.from_numpy(np.sort(array, axis=-1)[:, ::-1].copy())


def weights(scores: torch.Tensor, highest: torch.Tensor, floor: torch.Tensor | None) -> torch.Tensor:
    """exp(score - highest of its row), 0 below `floor` [rows, 1]; the row is padded with zeros to a multiple of `BLOCK`."""
    result = (scores - highest).exp_()
    if floor is not None:
        result.masked_fill_(scores < floor, 0.0)
    short = -result.shape[1] % BLOCK
    return torch.nn.functional.pad(result, (0, short)) if short else result


def cumulative_blocks(weights: torch.Tensor) -> torch.Tensor:
    """Running totals of whole blocks, float64 [rows, blocks]: added in the same order whatever the batch."""
    return weights.view(len(weights), -1, BLOCK).sum(-1).cumsum(-1, dtype=torch.float64)


def _nucleus(scores: torch.Tensor, highest: torch.Tensor, floor: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """The score at which the most probable tokens above `floor` first hold `share` of their sum; all [rows, 1]."""
    wanted = share * cumulative_blocks(weights(scores, highest, floor))[:, -1:]
    result, open_rows = floor.clone(), torch.arange(len(scores), device=scores.device)
    vocab = scores.shape[1]
    for width in (min(NUCLEUS_WIDTH, vocab), vocab):
        best = largest(_rows(scores, open_rows), width)
        mass = (
            (best - highest[open_rows])
            .exp_()
            .masked_fill_(best < floor[open_rows], 0.0)
            .cumsum(-1, dtype=torch.float64)
        )
        before = (mass < wanted[open_rows]).sum(-1, keepdim=True)
        found = (before < width).squeeze(1) if width < vocab else torch.ones_like(open_rows, dtype=torch.bool)
        at = best.gather(1, before.clamp(max=width - 1))
        done = open_rows[found]
        result[done] = torch.maximum(at[found], floor[done])
        open_rows = open_rows[~found]
        if not len(open_rows):
            break
    return result


def _rows(scores: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The rows of `index` in order; no copy if that is all of them."""
    return scores if len(index) == len(scores) else scores[index]
