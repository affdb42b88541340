"""Command R, Command A and their relatives. Read beside transformers/models/cohere and cohere2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.layers import (
    AddLayerNorm,
    Attention,
    ForwardBatch,
    GatedMLP,
    HeadsLayerNorm,
    QKVLinear,
    Rope,
    RowLinear,
    halves_first,
)
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers, positive


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(DecoderConfig):
    """`logit_scale` multiplies logits; `use_qk_norm`: whether each head of q and k is normed; `ropes_everywhere`: also
    where a layer sees everything while others slide."""

    logit_scale: float
    use_qk_norm: bool = False
    ropes_everywhere: bool = True


class CohereAttention(nn.Module):
    """Grouped-query attention; rope pairs neighbours."""

    def __init__(self, c: CohereConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim, eps = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.rms_norm_eps
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.attention_bias, num_paired=dim)
        order = halves_first(dim, dim)
        self.q_norm = HeadsLayerNorm(heads, dim, eps, order=order) if c.use_qk_norm else None
        self.k_norm = HeadsLayerNorm(kv_heads, dim, eps, order=order) if c.use_qk_norm else None
        self.has_rope = c.ropes_everywhere or c.window_of(layer) is not None
        self.rope = Rope(dim, c.rope_of(layer))
        self.attn = Attention(heads, kv_heads, dim, window=c.window_of(layer))
        self.o_proj = RowLinear(heads * dim, c.hidden_size, bias=c.attention_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.has_rope:
            q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class CohereBlock(nn.Module):
    """One norm, attention and MLP side by side, one sum."""

    def __init__(self, c: CohereConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = CohereAttention(c, layer)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act)
        self.input_layernorm = AddLayerNorm(c.hidden_size, c.rms_norm_eps, bias=False)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        return self.self_attn(x, batch) + self.mlp(x), residual


class CohereForCausalLM(DecoderLM):
    """Command R."""

    block = CohereBlock
    config_class = CohereConfig
    config_defaults: ClassVar[dict[str, Any]] = {"tie_word_embeddings": True, "logit_scale": 0.0625}
    config: CohereConfig

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Norms have an epsilon of another name."""
        return super().read_config({**raw, "rms_norm_eps": raw.get("layer_norm_eps", 1e-5)})

    def final_norm(self, config: DecoderConfig) -> nn.Module:
        """See `DecoderLM`."""
        return AddLayerNorm(config.hidden_size, config.rms_norm_eps, bias=False)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab], scaled."""
        return super().logits(hidden) * self.config.logit_scale


class Cohere2ForCausalLM(CohereForCausalLM):
    """Command R7B and Command A: three sliding layers, then a full one without rope."""

    config_defaults = {**CohereForCausalLM.config_defaults, "sliding_window": 4096}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Older files give the length of the pattern."""
        every = positive(raw, "sliding_window_pattern", 4)
        kinds = raw.get("layer_types") or [SLIDING if (i + 1) % every else FULL for i in range(num_layers(raw))]
        values = {**raw, "layer_types": kinds, "use_qk_norm": False, "ropes_everywhere": False}
        return super().read_config(values)
