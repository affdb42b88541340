"""Paged attention through torch's fused scaled_dot_product_attention, made for CPUs.

Decoding sequences of similar length are gathered into one padded batch; a prefill chunk attends for itself, in tiles of
queries that each read only the keys they can see. A gather names single slots, so no byte of another sequence and no
uninitialised slot is ever read, and padding repeats a slot of the sequence itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from samovar.attention.base import AttentionCall, AttentionPlan, AttentionSpec, LayerCache, Spans
from samovar.attention.latent import attend_chunk, attend_each, expands
from samovar.core.device_facts import DeviceFacts
from samovar.hardware.memory import GATHERED_KEYS, QUERY_TILE
from samovar.kernels.write_kv.rows import rows_at

GATHERED_TOKENS = GATHERED_KEYS
"""Most keys that one batch of decoding sequences gathers at a time (a longer sequence goes alone)."""

TILE = QUERY_TILE
"""Queries of a prefill chunk that attend together: bounds the mask to TILE x visible keys."""

SLACK_TOKENS = 64
"""A sequence this much shorter than the longest of a batch joins it: padding is cheaper than another call."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences that attend with one query each, in one call.

    `rows` [n] index the step's rows, None if they are all rows in order; `slots` [n * width] are the keys to gather;
    `hidden` [n, 1, 1, width] marks padding, None if there is none.
    """

    rows: torch.Tensor | None
    slots: torch.Tensor
    size: int
    hidden: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class PrefillSpan:
    """One sequence with several queries: rows start..stop of the step, visible keys in `slots`, `history` of which
    come before the first query's own."""

    start: int
    stop: int
    slots: torch.Tensor
    history: int


@dataclass(frozen=True, slots=True)
class View:
    """The step as layers with one window see it."""

    groups: list[DecodeGroup]
    prefills: list[PrefillSpan]


@dataclass(frozen=True, slots=True, eq=False)
class SdpaPlan:
    """One step; views by window, or chunk, are made when the first layer with that runs."""

    spans: Spans
    row_starts: list[int]
    views: dict[tuple[int | None, int | None, int], View] = field(default_factory=dict)

    def view(self, call: AttentionCall, block_size: int) -> View:
        """The step seen through the window or the chunk of `call`."""
        window, chunk = call.window, call.chunk
        key = (window, chunk, block_size)
        if key not in self.views:
            decodes = self._decodes(window, chunk, block_size)
            prefills = self._prefills(window, block_size) if chunk is None else self._pieces(chunk, block_size)
            self.views[key] = View(decodes, prefills)
        return self.views[key]

    def _decodes(self, window: int | None, chunk: int | None, block_size: int) -> list[DecodeGroup]:
        spans = self.spans
        decoding = [i for i, new in enumerate(spans.new_tokens) if new == 1]
        lengths = {i: min(spans.total_tokens[i], window or spans.total_tokens[i]) for i in decoding}
        if chunk is not None:
            lengths = {i: (spans.total_tokens[i] - 1) % chunk + 1 for i in decoding}
        return [self._group(members, lengths, block_size) for members in batches_of_similar_length(lengths)]

    def _group(self, members: list[int], lengths: dict[int, int], block_size: int) -> DecodeGroup:
        tables, everyone = self.spans.block_tables, len(members) == len(self.row_starts)
        device, width = tables.device, max(lengths[i] for i in members)
        count = torch.tensor([lengths[i] for i in members], device=device)[:, None]
        first = torch.tensor([self.spans.total_tokens[i] for i in members], device=device)[:, None] - count
        offset = torch.arange(width, device=device)[None]
        hidden = offset >= count
        at = first + offset.masked_fill(hidden, 0)
        own = tables if everyone else tables[torch.tensor(members, device=device)]
        slots = own.gather(1, at // block_size) * block_size + at % block_size
        padded = any(lengths[i] != width for i in members)
        rows = None if everyone else torch.tensor([self.row_starts[i] for i in members], device=device)
        return DecodeGroup(rows, slots.flatten(), len(members), hidden[:, None, None] if padded else None)

    def _prefills(self, window: int | None, block_size: int) -> list[PrefillSpan]:
        found = []
        for i, (new, total) in enumerate(zip(self.spans.new_tokens, self.spans.total_tokens, strict=True)):
            if new > 1:
                first = 0 if window is None else max(0, total - new - window + 1)
                at = torch.arange(first, total, device=self.spans.block_tables.device)
                slots = self.spans.block_tables[i][at // block_size] * block_size + at % block_size
                start = self.row_starts[i]
                found.append(PrefillSpan(start, start + new, slots, total - new - first))
        return found

    def _pieces(self, chunk: int, block_size: int) -> list[PrefillSpan]:
        """Sequences cut where chunks begin: within a chunk attention is causal and nothing else."""
        found = []
        for i, (new, total) in enumerate(zip(self.spans.new_tokens, self.spans.total_tokens, strict=True)):
            at, row = total - new, self.row_starts[i]
            while new > 1 and at < total:
                first = at // chunk * chunk
                end = min(first + chunk, total)
                keys = torch.arange(first, end, device=self.spans.block_tables.device)
                slots = self.spans.block_tables[i][keys // block_size] * block_size + keys % block_size
                found.append(PrefillSpan(row, row + end - at, slots, at - first))
                at, row = end, row + end - at
        return found


class TorchSdpaAttention:
    """See the module."""

    name = "torch_sdpa"
    captures = False

    def launch_shape(self, spans: Spans) -> None:
        """Nothing: it is never captured."""

    def accepts(self, spec: AttentionSpec, facts: DeviceFacts) -> str | None:
        """CPUs; soft caps and sinks take a slower path that keeps the scores in memory."""
        return None if facts.kind == "cpu" else "made for CPUs"

    def plan(self, spans: Spans) -> AttentionPlan:
        """Where each sequence's rows begin; the rest is made for each window when it is first seen."""
        starts, row = [], 0
        for new in spans.new_tokens:
            starts.append(row)
            row += new
        return SdpaPlan(spans, starts)

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        call: AttentionCall,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        view = cast(SdpaPlan, plan).view(call, cache[0].shape[1])
        if len(view.groups) == 1 and view.groups[0].rows is None:
            return _decode(q, cache, view.groups[0], call, sinks)
        out = q.new_empty((*q.shape[:2], q.shape[2] if call.latent is None else call.latent.value))
        for group in view.groups:
            assert group.rows is not None, "a group of all rows is the only one"
            out[group.rows] = _decode(q[group.rows], cache, group, call, sinks)
        for span in view.prefills:
            _prefill(q[span.start : span.stop], cache, span, call, sinks, out[span.start : span.stop])
        return out


def batches_of_similar_length(lengths: dict[int, int]) -> list[list[int]]:
    """Split sequences (index -> visible keys) into batches whose padding stays under a third, or a few tokens each."""
    batches: list[list[int]] = []
    longest = 0
    for i in sorted(lengths, key=lambda i: -lengths[i]):
        near = 3 * lengths[i] >= 2 * longest or longest - lengths[i] <= SLACK_TOKENS
        if batches and near and (len(batches[-1]) + 1) * longest <= GATHERED_TOKENS:
            batches[-1].append(i)
        else:
            batches.append([i])
            longest = lengths[i]
    return [sorted(batch) for batch in batches]


def _gather(cache: LayerCache, which: int, slots: torch.Tensor, size: int, q: torch.Tensor) -> torch.Tensor:
    """Keys (`which` 0) or values (1) of `slots` -> [size, kv_heads, keys, head_dim] of q's dtype."""
    codes, head_dim, dtype = cache[which], q.shape[2], q.dtype
    if codes.itemsize == 1:
        rows = rows_at(cache, which, slots // codes.shape[1], slots % codes.shape[1], head_dim)
        return rows.view(size, -1, *rows.shape[1:]).to(dtype).transpose(1, 2)
    kv_heads, dim = codes.shape[2:]
    rows = codes.view(-1, kv_heads * dim).index_select(0, slots)
    return rows.view(size, -1, kv_heads, dim).to(dtype).transpose(1, 2)


def _decode(
    q: torch.Tensor,
    cache: LayerCache,
    group: DecodeGroup,
    call: AttentionCall,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q [n, heads, head_dim], one query for each sequence of the group -> the same shape, or values of a latent layer."""
    if call.latent is not None:
        rows = _gather(cache, 0, group.slots, group.size, q)[:, 0]
        return attend_each(q, rows, cache[1], group.hidden, call)
    k, v = (_gather(cache, which, group.slots, group.size, q) for which in range(2))
    mask = None
    if group.hidden is not None:
        mask = torch.zeros(group.hidden.shape, dtype=q.dtype, device=q.device).masked_fill_(group.hidden, -torch.inf)
    if call.softcap is not None or sinks is not None:
        return bounded_attention(q.unsqueeze(2), k, v, mask, call, sinks).view_as(q)
    # The heads that share keys are the "queries" here: no key is repeated.
    grouped = q.view(len(q), k.shape[1], -1, q.shape[2])
    return scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=call.scale).reshape(q.shape)


def _prefill(
    q: torch.Tensor,
    cache: LayerCache,
    span: PrefillSpan,
    call: AttentionCall,
    sinks: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """q, out [new, heads, head_dim]: the last `new` positions of one sequence."""
    if call.latent is not None:
        rows = _gather(cache, 0, span.slots, 1, q)[0, 0]
        out.copy_(attend_chunk(q, rows, cache[1], call, expand=expands(len(q), len(rows), call.latent)))
        return
    k, v = (_gather(cache, which, span.slots, 1, q) for which in range(2))
    heads_first, new, total = q.transpose(0, 1)[None], len(q), k.shape[2]
    is_plain = call.softcap is None and sinks is None
    if is_plain and span.history == 0 and (call.window is None or new <= call.window):
        y = scaled_dot_product_attention(heads_first, k, v, is_causal=True, scale=call.scale, enable_gqa=True)
        out.copy_(y[0].transpose(0, 1))
        return
    for start in range(0, new, TILE):
        stop = min(start + TILE, new)
        last = span.history + stop
        first = 0 if call.window is None else max(0, span.history + start - call.window + 1)
        mask = tile_mask(stop - start, last - first, call.window, q)
        part = heads_first[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], mask
        if is_plain:
            y = scaled_dot_product_attention(*part, scale=call.scale, enable_gqa=True)
        else:
            y = bounded_attention(*part, call, sinks)
        out[start:stop] = y[0].transpose(0, 1)
        del mask, part, y  # The plan counts one tile: this one must be gone before the next is made.
    assert last == total, f"{last} keys planned, {total} gathered"


def tile_mask(rows: int, keys: int, window: int | None, like: torch.Tensor) -> torch.Tensor:
    """Additive mask [rows, keys] for the last `rows` positions of `keys`; only its edges need computing."""
    mask = torch.full((rows, rows), -torch.inf, dtype=like.dtype, device=like.device).triu_(1)
    mask = pad(mask, (keys - rows, 0))
    if window is not None and keys > window:
        # Row r is at key keys - rows + r and sees the `window` keys up to it.
        old = torch.ones((rows, keys), dtype=torch.bool, device=like.device).tril_(keys - rows - window)
        mask.masked_fill_(old, -torch.inf)
    return mask


def bounded_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    call: AttentionCall,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with a soft cap or sinks, scores in float32.

    q [n, heads, rows, head_dim], k and v [n, kv_heads, keys, head_dim], mask broadcastable to [n, 1, rows, keys].
    """
    (n, heads, rows, dim), kv_heads = q.shape, k.shape[1]
    grouped = q.float().reshape(n, kv_heads, -1, dim)
    scores = (grouped @ k.float().transpose(2, 3) * call.scale).view(n, heads, rows, -1)
    if call.softcap is not None:
        scores = scores.div_(call.softcap).tanh_().mul_(call.softcap)
    if mask is not None:
        scores += mask
    if sinks is not None:
        extra = sinks.float().view(1, heads, 1, 1).expand(n, heads, rows, 1)
        weights = torch.cat((scores, extra), dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    y = weights.reshape(n, kv_heads, -1, k.shape[2]) @ v.float()
    return y.view(q.shape).to(q.dtype)
