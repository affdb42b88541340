"""GLM-4, dense. Read beside transformers/models/glm and glm4."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn

from samovar.layers import ForwardBatch, GatedMLP, QKVLinear, RMSNorm, RowLinear
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.llama import LlamaAttention, LlamaBlock


class GlmAttention(LlamaAttention):
    """Llama's attention with biases on q, k and v; rope turns a part of each head and pairs neighbours."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        paired = c.rope_of(layer).rotary_dim(dim)
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.attention_bias, num_paired=paired)
        self.o_proj = RowLinear(heads * dim, c.hidden_size)


class GlmBlock(LlamaBlock):
    """Pre-norm attention and MLP; the checkpoint stores gate and up as one tensor."""

    attention: type[nn.Module] = GlmAttention
    stored_fused: ClassVar[bool] = True

    def feed_forward(self, c: DecoderConfig) -> nn.Module:
        """See `LlamaBlock`."""
        return GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act, stored_fused=self.stored_fused)


class GlmForCausalLM(DecoderLM):
    """GLM-4 9B and GLM-Edge."""

    block: ClassVar[type[nn.Module]] = GlmBlock
    config_defaults: ClassVar[dict[str, Any]] = {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}


class Glm4Block(GlmBlock):
    """The same with a norm behind attention and one behind the MLP."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.post_self_attn_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_mlp_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        x = self.post_self_attn_layernorm(self.self_attn(x, batch))
        x, residual = self.post_attention_layernorm(x, residual)
        return self.post_mlp_layernorm(self.mlp(x)), residual


class Glm4ForCausalLM(GlmForCausalLM):
    """GLM-4 0414 and GLM-Z1."""

    block = Glm4Block
