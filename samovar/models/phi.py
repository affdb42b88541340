"""Phi 1, 1.5 and 2. Read beside transformers/models/phi/modeling_phi.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samovar.layers import MLP, ForwardBatch, LayerNorm
from samovar.models.config import DecoderConfig
from samovar.models.llama import LlamaAttention
from samovar.models.starcoder2 import LayerNormBlock, LayerNormLM


@dataclass(frozen=True, slots=True, kw_only=True)
class PhiConfig(DecoderConfig):
    """`qk_layernorm`: each head of q and k is normed."""

    qk_layernorm: bool = False


class PhiAttention(LlamaAttention):
    """Llama's attention with biases; rope turns a part of each head."""

    def __init__(self, c: PhiConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.q_layernorm = LayerNorm(c.head_dim, c.rms_norm_eps) if c.qk_layernorm else None
        self.k_layernorm = LayerNorm(c.head_dim, c.rms_norm_eps) if c.qk_layernorm else None

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class PhiBlock(LayerNormBlock):
    """One norm, attention and MLP side by side, one sum."""

    attention = PhiAttention

    def __init__(self, c: PhiConfig, layer: int) -> None:
        super().__init__(c, layer)
        del self.post_attention_layernorm

    def feed_forward(self, c: DecoderConfig) -> nn.Module:
        """See `LlamaBlock`."""
        return MLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=True)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        return self.self_attn(x, batch) + self.mlp(x), residual


class PhiForCausalLM(LayerNormLM):
    """Phi."""

    block = PhiBlock
    config_class = PhiConfig
    config_defaults = {"hidden_act": "gelu_new", "partial_rotary_factor": 0.5}
    renames = {
        "self_attn.o_proj": "self_attn.dense",
        "mlp.up_proj": "mlp.fc1",
        "mlp.down_proj": "mlp.fc2",
        "model.norm": "model.final_layernorm",
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Every product has a bias."""
        return super().read_config({**raw, "attention_bias": True})

    def has_head_bias(self, config: DecoderConfig) -> bool:
        """So have logits."""
        return True
