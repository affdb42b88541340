"""Attention of Gemma 4 and 3n: over keys and values of its own, and over those of an earlier layer."""

from __future__ import annotations

import torch
from torch import nn

from samovar.layers import (
    Attention,
    ForwardBatch,
    HeadsLinear,
    QKVLinear,
    QueryRope,
    RMSNorm,
    Rope,
    RowLinear,
    SharedAttention,
    UnitRMSNorm,
)
from samovar.models.gemma4_config import Gemma4Config


class Gemma4Attention(nn.Module):
    """Grouped-query attention; each head of q, k and v is normed, and scores are not scaled."""

    def __init__(self, c: Gemma4Config, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim, eps = c.num_attention_heads, c.kv_heads[layer], c.head_dims[layer], c.rms_norm_eps
        has_values = not c.attention_k_eq_v or c.window_of(layer) is not None
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.attention_bias, has_values=has_values)
        self.q_norm, self.k_norm, self.v_norm = RMSNorm(dim, eps), RMSNorm(dim, eps), UnitRMSNorm(dim, eps)
        self.rope = Rope(dim, c.rope_of(layer))
        self.attn = Attention(heads, kv_heads, dim, scale=1.0, window=c.window_of(layer))
        self.o_proj = RowLinear(heads * dim, c.hidden_size, bias=c.attention_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        q, k = self.rope(self.q_norm(q), self.k_norm(k), batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, self.v_norm(v), batch))
        return y


class Gemma4SharedAttention(nn.Module):
    """The same over the keys and values of an earlier layer."""

    def __init__(self, c: Gemma4Config, layer: int) -> None:
        super().__init__()
        heads, dim = c.num_attention_heads, c.head_dims[layer]
        self.q_proj = HeadsLinear(c.hidden_size, heads, dim, bias=c.attention_bias)
        self.q_norm = RMSNorm(dim, c.rms_norm_eps)
        self.rope = QueryRope(dim, c.rope_of(layer))
        self.attn = SharedAttention()
        self.o_proj = RowLinear(heads * dim, c.hidden_size, bias=c.attention_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q = self.rope(self.q_norm(self.q_proj(x)), batch)
        y: torch.Tensor = self.o_proj(self.attn(q, batch))
        return y
