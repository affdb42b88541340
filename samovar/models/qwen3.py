"""Qwen3 dense. Read beside transformers/models/qwen3/modeling_qwen3.py: same names, same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from samovar.layers import Attention, ForwardBatch, QKVLinear, RMSNorm, Rope, RowLinear
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.llama import LlamaBlock
from samovar.models.qwen2 import with_window_layers


class Qwen3Attention(nn.Module):
    """Grouped-query attention; each head of q and k is normed before rope."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.attention_bias)
        self.q_norm = RMSNorm(dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(dim, c.rms_norm_eps)
        self.rope = Rope(dim, c.rope_of(layer))
        self.attn = Attention(heads, kv_heads, dim, window=c.window_of(layer))
        self.o_proj = RowLinear(heads * dim, c.hidden_size, bias=c.attention_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        q, k = self.rope(self.q_norm(q), self.k_norm(k), batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class Qwen3Block(LlamaBlock):
    """Pre-norm attention and MLP."""

    attention = Qwen3Attention


class Qwen3ForCausalLM(DecoderLM):
    """Qwen3."""

    block = Qwen3Block
    config_defaults = {"head_dim": 128}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Layers from `max_window_layers` on slide, if sliding is switched on."""
        return super().read_config(with_window_layers(raw))
