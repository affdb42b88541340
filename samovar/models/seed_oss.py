"""Seed-OSS. Read beside transformers/models/seed_oss/modeling_seed_oss.py."""

from __future__ import annotations

from dataclasses import dataclass

from samovar.layers import RowLinear
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.llama import LlamaAttention, LlamaBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOssConfig(DecoderConfig):
    """`attention_out_bias`: whether the projection behind attention has a bias."""

    attention_out_bias: bool


class SeedOssAttention(LlamaAttention):
    """Llama's attention; the biases of what goes in and of what comes out are options of their own."""

    def __init__(self, c: SeedOssConfig, layer: int) -> None:
        super().__init__(c, layer)
        width = c.num_attention_heads * c.head_dim
        self.o_proj = RowLinear(width, c.hidden_size, bias=c.attention_out_bias)


class SeedOssBlock(LlamaBlock):
    """Pre-norm attention and MLP."""

    attention = SeedOssAttention


class SeedOssForCausalLM(DecoderLM):
    """Seed-OSS."""

    block = SeedOssBlock
    config_class = SeedOssConfig
    config_defaults = {"head_dim": 128, "attention_bias": True, "attention_out_bias": False}
