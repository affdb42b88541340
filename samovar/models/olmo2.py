"""OLMo 2. Read beside transformers/models/olmo2/modeling_olmo2.py: same names, same order."""

from __future__ import annotations

import torch
from torch import nn

from samovar.layers import Attention, ForwardBatch, GatedMLP, HeadsRMSNorm, QKVLinear, RMSNorm, Rope, RowLinear
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM


class Olmo2Attention(nn.Module):
    """Grouped-query attention; q and k are normed over all their heads together before rope."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.attention_bias)
        self.q_norm = HeadsRMSNorm(heads, dim, c.rms_norm_eps)
        self.k_norm = HeadsRMSNorm(kv_heads, dim, c.rms_norm_eps)
        self.rope = Rope(dim, c.rope_of(layer))
        self.attn = Attention(heads, kv_heads, dim, window=c.window_of(layer))
        self.o_proj = RowLinear(heads * dim, c.hidden_size, bias=c.attention_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        q, k = self.rope(self.q_norm(q), self.k_norm(k), batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class Olmo2Block(nn.Module):
    """Attention and MLP, each normed after it and before the residual add; neither is normed before."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = Olmo2Attention(c, layer)
        self.mlp: nn.Module = GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_feedforward_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x = x if residual is None else x + residual
        x = x + self.post_attention_layernorm(self.self_attn(x, batch))
        return self.post_feedforward_layernorm(self.mlp(x)), x


class Olmo2ForCausalLM(DecoderLM):
    """OLMo 2."""

    block = Olmo2Block
