"""Llama 4, text. Read beside transformers/models/llama4/modeling_llama4.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.layers import (
    Attention,
    Experts,
    ExpertStorage,
    ForwardBatch,
    GatedMLP,
    Layer,
    PositionScale,
    QKVLinear,
    Rope,
    Router,
    Routing,
    RowLinear,
    UnitRMSNorm,
)
from samovar.models.config import DecoderConfig
from samovar.models.decoder import EYES, TEXT_ONLY, DecoderLM
from samovar.models.fields import text_fields
from samovar.models.llama import LlamaBlock
from samovar.models.llama4_config import Llama4Config, with_kinds


class Llama4Attention(nn.Module):
    """Grouped-query attention in chunks, with rope that pairs neighbours; or over everything, without."""

    def __init__(self, c: Llama4Config, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.has_rope = bool(c.no_rope_layers[layer])
        self.qkv_proj = QKVLinear(
            c.hidden_size, heads, kv_heads, dim, bias=c.attention_bias, num_paired=dim if self.has_rope else 0
        )
        self.rope = Rope(dim, c.rope_of(layer))
        self.norm = UnitRMSNorm(dim, c.rms_norm_eps) if c.use_qk_norm else None
        self.growth = PositionScale(c.attn_scale, c.floor_scale, 1) if c.attn_temperature_tuning else None
        chunk = c.attention_chunk_size if layer in c.chunked_layers else None
        self.attn = Attention(heads, kv_heads, dim, chunk=chunk)
        self.o_proj = RowLinear(heads * dim, c.hidden_size, bias=c.attention_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        if self.has_rope:
            q, k = self.rope(q, k, batch)
            if self.norm is not None:
                q, k = self.norm(q), self.norm(k)
        elif self.growth is not None:
            q = self.growth(q, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class WeighedInput(Layer):
    """What the one expert of a token is given: the token times its weight, which then counts as one."""

    is_row_wise = True

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden], weights float32 [tokens, 1] -> (x times weights, ones)."""
        return x * weights.to(x.dtype), torch.ones_like(weights)


class Llama4MoE(nn.Module):
    """One expert a token, weighed at its input, and a network for every token."""

    def __init__(self, c: Llama4Config) -> None:
        super().__init__()
        routing = Routing(top_k=1, scoring="sigmoid", renormalize=False)
        self.router = Router(c.hidden_size, c.num_experts, routing)
        self.weighed = WeighedInput()
        storage = ExpertStorage(stacked=True, bare=True, transposed=True)
        self.experts = Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts, c.hidden_act, storage=storage)
        self.shared_expert = GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        weights, ids = self.router(x)
        inputs, ones = self.weighed(x, weights)
        y: torch.Tensor = self.experts(inputs, ones, ids, self.shared_expert(x))
        return y


class Llama4Block(LlamaBlock):
    """Pre-norm attention, and experts or in some layers one network for all tokens."""

    attention = Llama4Attention

    def __init__(self, c: Llama4Config, layer: int) -> None:
        super().__init__(c, layer)
        is_sparse = layer in c.sparse_layers
        self.mlp = Llama4MoE(c) if is_sparse else GatedMLP(c.hidden_size, c.intermediate_size_mlp, c.hidden_act)


class Llama4ForCausalLM(DecoderLM):
    """Llama 4, text only."""

    block = Llama4Block
    config_class = Llama4Config
    config_defaults: ClassVar[dict[str, Any]] = {
        "head_dim": 128,
        "num_experts_per_tok": 1,
        "rope_theta": 500_000.0,
        "intermediate_size_mlp": 16_384,
        "attention_chunk_size": 8192,
    }
    renames: ClassVar[dict[str, str]] = {"mlp": "feed_forward"}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """See `with_kinds`."""
        return super().read_config(with_kinds({**cls.config_defaults, **raw}))


class Llama4ForConditionalGeneration(Llama4ForCausalLM):
    """Scout and Maverick: the text model; images are not read."""

    renames: ClassVar[dict[str, str]] = {
        "model": "language_model.model",
        "lm_head": "language_model.lm_head",
        **Llama4ForCausalLM.renames,
    }
    ignore_beginnings = EYES
    notes = TEXT_ONLY

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """The text model's fields stand in an object of their own."""
        return super().read_config(text_fields(raw))
