"""Llama 1 to 3, and Mistral. Read beside transformers/models/llama/modeling_llama.py: same names, same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from samovar.errors import CheckpointError
from samovar.layers import AddRMSNorm, Attention, ForwardBatch, GatedMLP, QKVLinear, Rope, RowLinear
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers


class LlamaAttention(nn.Module):
    """Grouped-query attention with rope; biases on all four projections if the config asks."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.attention_bias)
        self.rope = Rope(dim, c.rope_of(layer))
        self.attn = Attention(heads, kv_heads, dim, window=c.window_of(layer))
        self.o_proj = RowLinear(heads * dim, c.hidden_size, bias=c.attention_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class LlamaBlock(nn.Module):
    """Pre-norm attention and MLP."""

    attention: type[nn.Module] = LlamaAttention

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = self.attention(c, layer)
        self.mlp: nn.Module = self.feed_forward(c)
        self.input_layernorm: nn.Module = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm: nn.Module = AddRMSNorm(c.hidden_size, c.rms_norm_eps)

    def feed_forward(self, c: DecoderConfig) -> nn.Module:
        """The network behind attention."""
        return GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x, batch), residual)
        return self.mlp(x), residual


class LlamaForCausalLM(DecoderLM):
    """Llama."""

    block = LlamaBlock


class MistralForCausalLM(DecoderLM):
    """Mistral: Llama whose every layer slides if the config has a window."""

    block = LlamaBlock
    config_defaults = {"sliding_window": 4096}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers alike, whatever `layer_types` says."""
        kind = FULL if {**cls.config_defaults, **raw}["sliding_window"] is None else SLIDING
        return super().read_config({**raw, "layer_types": [kind] * num_layers(raw)})


class InternLM3ForCausalLM(DecoderLM):
    """InternLM 3: Llama with biases of other names."""

    block = LlamaBlock
    config_defaults = {"head_dim": 128}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Attention has biases if all products have."""
        has_qkv, has_others = raw.get("qkv_bias", raw.get("attention_bias")), raw.get("bias", raw.get("mlp_bias"))
        if (has_qkv or False) != (has_others or False):
            raise CheckpointError(f"config.json: qkv_bias {has_qkv!r} must be what bias is, {has_others!r}")
        return super().read_config({**raw, "attention_bias": has_qkv or False, "mlp_bias": has_others or False})
