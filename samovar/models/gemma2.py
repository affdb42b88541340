"""Gemma 1 and 2. Read beside transformers/models/gemma2/modeling_gemma2.py: same names, same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from samovar.layers import AddRMSNorm, Attention, ForwardBatch, GatedMLP, QKVLinear, RMSNorm, Rope, RowLinear
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers
from samovar.models.llama import LlamaBlock


class Gemma2Attention(nn.Module):
    """Grouped-query attention with bounded scores and a scale of its own; every other layer slides."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.attention_bias)
        self.rope = Rope(dim, c.rope_of(layer))
        self.attn = Attention(
            heads,
            kv_heads,
            dim,
            scale=c.attention_scale,
            window=c.window_of(layer),
            softcap=c.attn_logit_softcapping,
        )
        self.o_proj = RowLinear(heads * dim, c.hidden_size, bias=c.attention_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class Gemma2Block(nn.Module):
    """Attention and MLP, each normed before and after; norm weights are stored as differences from one."""

    attention: type[nn.Module] = Gemma2Attention

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = self.attention(c, layer)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act)
        self.input_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps, offset=True)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, offset=True)
        self.pre_feedforward_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps, offset=True)
        self.post_feedforward_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps, offset=True)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        x = self.post_attention_layernorm(self.self_attn(x, batch))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        return self.post_feedforward_layernorm(self.mlp(x)), residual


class Gemma2ForCausalLM(DecoderLM):
    """Gemma 2."""

    block = Gemma2Block
    norm_offset = True
    config_defaults = {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Without `layer_types`, even layers slide."""
        kinds = raw.get("layer_types") or [FULL if i % 2 else SLIDING for i in range(num_layers(raw))]
        return super().read_config({**raw, "layer_types": kinds})

    def embed_scale(self, config: DecoderConfig) -> float:
        """Embeddings are multiplied by the root of the hidden size."""
        return float(config.hidden_size**0.5)


class GemmaBlock(LlamaBlock):
    """Llama's block; norm weights are stored as differences from one."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.input_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps, offset=True)
        self.post_attention_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps, offset=True)


class GemmaForCausalLM(DecoderLM):
    """Gemma 1."""

    block = GemmaBlock
    norm_offset = True
    config_defaults = {"tie_word_embeddings": True, "head_dim": 256}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Old files say "gelu" and were trained with its approximation."""
        return super().read_config({**raw, "hidden_activation": raw.get("hidden_activation") or "gelu_pytorch_tanh"})

    def embed_scale(self, config: DecoderConfig) -> float:
        """Embeddings are multiplied by the root of the hidden size."""
        return float(config.hidden_size**0.5)
