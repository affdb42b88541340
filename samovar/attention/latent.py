"""Latent attention in plain torch, and which of its two ways costs less.

Multi-head latent attention (DeepSeek V2, 2024) caches a row of latent numbers a token, from which every head's key and
value can be made. Few queries are absorbed: a query is brought to the latent space, attends over the rows as one head of
keys, and what it gets is brought back. For many queries the keys and values of all heads are made once: more work for
each key, but a third of it for each pair of query and key.
"""

from __future__ import annotations

import torch

from samovar.attention.base import AttentionCall
from samovar.core.cache_spec import LatentDims
from samovar.hardware.latent_memory import LATENT_SCORES


def expands(new: int, total: int, dims: LatentDims) -> bool:
    """Whether `new` queries that see up to `total` keys are served faster by making the keys and values of all heads, in
    products of a head."""
    pairs = new * (total - new) + new * (new + 1) // 2
    made = dims.rank * (dims.nope + dims.value)
    return pairs * (dims.query + dims.value) + total * made < pairs * (dims.row + dims.rank) + new * made


def expanded(rows: torch.Tensor, expansion: torch.Tensor, dims: LatentDims) -> tuple[torch.Tensor, torch.Tensor]:
    """rows [keys, rank + rope], expansion [heads, nope + value, rank] -> keys [keys, heads, nope + rope], values [keys,
    heads, value]."""
    heads = len(expansion)
    made = (rows[:, : dims.rank] @ expansion.flatten(0, 1).T).view(len(rows), heads, -1)
    k, v = torch.split(made, [dims.nope, dims.value], dim=-1)
    turned = rows[:, None, dims.rank :].expand(-1, heads, -1)
    return torch.cat((k, turned), dim=-1), v


def absorbed(q: torch.Tensor, expansion: torch.Tensor, dims: LatentDims) -> torch.Tensor:
    """q [n, heads, nope + rope] -> [n, heads, rank + rope]: what gives with rows the scores that q gives with keys."""
    plain, turned = torch.split(q, [dims.nope, dims.rope], dim=-1)
    latent = torch.bmm(plain.transpose(0, 1), expansion[:, : dims.nope])
    return torch.cat((latent.transpose(0, 1), turned), dim=-1)


def brought_back(y: torch.Tensor, expansion: torch.Tensor, dims: LatentDims) -> torch.Tensor:
    """y [n, heads, rank], sums of latent numbers -> [n, heads, value], the same sums of values."""
    return torch.bmm(y.transpose(0, 1), expansion[:, dims.nope :].transpose(1, 2)).transpose(0, 1)


def attend_each(
    q: torch.Tensor, rows: torch.Tensor, expansion: torch.Tensor, hidden: torch.Tensor | None, call: AttentionCall
) -> torch.Tensor:
    """One query for each of some sequences, absorbed.

    q [n, heads, nope + rope]; rows [n, width, rank + rope]; hidden [n, 1, 1, width], True where there is no key, or None.
    Returns [n, heads, value].
    """
    dims, dtype = _dims(call), q.dtype
    q, rows, expansion = q.float(), rows.float(), expansion.float()
    scores = torch.bmm(absorbed(q, expansion, dims), rows.transpose(1, 2)).mul_(call.scale)
    if hidden is not None:
        scores.masked_fill_(hidden[:, 0], -torch.inf)
    y = torch.bmm(scores.softmax(-1), rows[..., : dims.rank])
    return brought_back(y, expansion, dims).to(dtype)


def attend_chunk(
    q: torch.Tensor, rows: torch.Tensor, expansion: torch.Tensor, call: AttentionCall, *, expand: bool
) -> torch.Tensor:
    """The last rows of one sequence: q [new, heads, nope + rope] over rows [total, rank + rope] -> [new, heads, value]."""
    dims, dtype = _dims(call), q.dtype
    q, rows, expansion = q.float(), rows.float(), expansion.float()
    if not expand:
        y = _causal(absorbed(q, expansion, dims), rows[:, None], rows[:, None, : dims.rank], call.scale)
        return brought_back(y, expansion, dims).to(dtype)
    out = q.new_empty((*q.shape[:2], dims.value))
    step = max(1, LATENT_SCORES // (len(rows) * (dims.query + dims.value)))
    for first in range(0, q.shape[1], step):
        heads = slice(first, first + step)
        out[:, heads] = _causal(q[:, heads], *expanded(rows, expansion[heads], dims), call.scale)
    return out.to(dtype)


def _dims(call: AttentionCall) -> LatentDims:
    assert call.latent is not None, "the layer is not a latent one"
    return call.latent


def _causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [new, heads, width] over k, v [total, heads, or one for all, width] -> [new, heads, v's width], in tiles of queries."""
    (new, heads, _), total = q.shape, len(k)
    history, tile = total - new, max(1, LATENT_SCORES // (heads * total))
    keys, values = k.permute(1, 2, 0), v.transpose(0, 1)
    found = q.new_empty((new, heads, v.shape[2]))
    for start in range(0, new, tile):
        stop = min(start + tile, new)
        last = history + stop
        future = torch.ones((stop - start, last), dtype=torch.bool, device=q.device).triu_(history + start + 1)
        scores = torch.matmul(q[start:stop].transpose(0, 1), keys[..., :last]).mul_(scale)
        weights = scores.masked_fill_(future, -torch.inf).softmax(-1)
        found[start:stop] = torch.matmul(weights, values[:, :last]).transpose(0, 1)
    return found
