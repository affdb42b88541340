"""OLMo 1. Read beside transformers/models/olmo/modeling_olmo.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from samovar.layers import Clip, ForwardBatch
from samovar.models.config import DecoderConfig
from samovar.models.llama import LlamaAttention
from samovar.models.starcoder2 import LayerNormBlock, LayerNormLM


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    """`clip_qkv` bounds q, k and v."""

    clip_qkv: float | None = None


class OlmoAttention(LlamaAttention):
    """Llama's attention; q, k and v may be bounded."""

    def __init__(self, c: OlmoConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.clip = None if c.clip_qkv is None else Clip(c.clip_qkv)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        if self.clip is not None:
            q, k, v = self.clip(q), self.clip(k), self.clip(v)
        q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class OlmoBlock(LayerNormBlock):
    """Pre-norm attention and MLP; norms have no weights."""

    attention = OlmoAttention
    norm_options: ClassVar[dict[str, bool]] = {"has_weight": False}


class OlmoForCausalLM(LayerNormLM):
    """OLMo 1."""

    block = OlmoBlock
    config_class = OlmoConfig

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Norms have the epsilon that no file mentions."""
        return super().read_config({**raw, cls.epsilon: 1e-5})
