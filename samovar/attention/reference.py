"""Paged attention in plain torch: slow, obvious, and what every other backend is tested against."""

from __future__ import annotations

from typing import cast

import torch

from samovar.attention.base import AttentionCall, AttentionPlan, AttentionSpec, LayerCache, Spans
from samovar.attention.latent import expanded
from samovar.core.device_facts import DeviceFacts
from samovar.kernels.write_kv.rows import rows_at


class ReferenceAttention:
    """One sequence at a time, in float32, every feature."""

    name = "reference"
    captures = False

    def launch_shape(self, spans: Spans) -> None:
        """Nothing: it is never captured."""

    def accepts(self, spec: AttentionSpec, facts: DeviceFacts) -> str | None:
        """Everything, everywhere."""
        return None

    def plan(self, spans: Spans) -> AttentionPlan:
        """The spans themselves."""
        return spans

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        call: AttentionCall,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.run`."""
        spans = cast(Spans, plan)
        width = q.shape[2] if call.latent is None else call.latent.value
        out, start, size = q.new_empty((*q.shape[:2], width)), 0, cache[0].shape[1]
        for new, total, table in zip(spans.new_tokens, spans.total_tokens, spans.block_tables, strict=True):
            at = torch.arange(total, device=q.device)
            slots = table[at // size].long(), at % size
            if call.latent is None:
                k, v = (rows_at(cache, which, *slots, q.shape[2]) for which in range(2))
            else:
                k, v = expanded(cache[0][slots][:, 0].float(), cache[1].float(), call.latent)
            out[start : start + new] = attend(q[start : start + new], k, v, call, sinks)
            start += new
        return out


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall, sinks: torch.Tensor | None
) -> torch.Tensor:
    """The last rows of one sequence: q [new, heads, dim] against all its k, v [total, kv_heads, dim] -> like q, as wide as
    values are."""
    new, total, group = len(q), len(k), q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), k) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    q_pos = torch.arange(total - new, total, device=q.device)[:, None]
    k_pos = torch.arange(total, device=q.device)[None]
    hidden = k_pos > q_pos
    if call.window is not None:
        hidden = hidden | (k_pos <= q_pos - call.window)
    if call.chunk is not None:
        hidden = hidden | (k_pos < q_pos // call.chunk * call.chunk)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, new, 1)), dim=-1)
    weights = scores.softmax(-1)[..., :total]
    return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)
