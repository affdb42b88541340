"""OLMo 2 and 3. Read beside transformers/models/olmo2/modeling_olmo2.py: same names, same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from samovar.layers import Attention, ForwardBatch, GatedMLP, HeadsRMSNorm, QKVLinear, RMSNorm, Rope, RowLinear
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers, section


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

    attention: type[nn.Module] = Olmo2Attention

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = self.attention(c, layer)
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


class Olmo3ForCausalLM(DecoderLM):
    """OLMo 3: three sliding layers, then a full one; only full ones scale their rope."""

    block = Olmo2Block
    config_defaults = {"sliding_window": 4096}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Older files give one theta and one scaling instead of `rope_parameters` by kind."""
        by_kind = section(raw, "rope_parameters")
        kinds = raw.get("layer_types") or [SLIDING if (i + 1) % 4 else FULL for i in range(num_layers(raw))]
        plain = {"rope_theta": raw.get("rope_theta", 500_000.0)}
        local, wide = {**plain, **section(by_kind, SLIDING)}, {**plain, **section(raw, "rope_scaling")}
        wide |= section(by_kind, FULL)
        return super().read_config({**raw, "layer_types": kinds, "rope_parameters": {SLIDING: local, FULL: wide}})
