"""GLM-4.5 to 4.7, dots.llm1 and Solar Open: DeepSeek V3's mixture behind grouped-query attention.

Read beside transformers/models/glm4_moe, dots1 and solar_open.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.layers import ForwardBatch, QKVLinear, RMSNorm, RowLinear
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import integer, num_layers, positive
from samovar.models.llama import LlamaAttention
from samovar.models.mixture import BiasedMixtureBlock, MixtureConfig, with_mixture
from samovar.models.qwen3 import Qwen3Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm4MoeConfig(MixtureConfig):
    """`use_qk_norm`: whether each head of q and k is normed."""

    use_qk_norm: bool = False


class Glm4MoeAttention(LlamaAttention):
    """Grouped-query attention with biases on q, k and v; large models norm each head of q and k."""

    def __init__(self, c: Glm4MoeConfig, layer: int) -> None:
        super().__init__(c, layer)
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.attention_bias)
        self.q_norm = RMSNorm(dim, c.rms_norm_eps) if c.use_qk_norm else None
        self.k_norm = RMSNorm(dim, c.rms_norm_eps) if c.use_qk_norm else None
        self.o_proj = RowLinear(heads * dim, c.hidden_size)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class Glm4MoeBlock(BiasedMixtureBlock):
    """The first layers are dense."""

    attention = Glm4MoeAttention


class Glm4MoeForCausalLM(DecoderLM):
    """GLM-4.5 to 4.7. Layers behind the last, which guess further tokens, are left unread."""

    block: ClassVar[type[nn.Module]] = Glm4MoeBlock
    config_class: ClassVar[type[DecoderConfig]] = Glm4MoeConfig
    config_defaults: ClassVar[dict[str, Any]] = {
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "partial_rotary_factor": 0.5,
        "norm_topk_prob": True,
    }
    default_experts: ClassVar[int | None] = 128

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.ignore_beginnings = (f"model.layers.{config.num_hidden_layers}.",)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Layers from `first_k_dense_replace` on are mixtures; the shared experts are one network as wide as all."""
        values = {**cls.config_defaults, **raw}
        name = "first_k_dense_replace"
        first = 0 if values.get(name) == 0 else positive(values, name, cls.config_defaults[name])
        if values.get("n_shared_experts"):
            wide = integer(values, "n_shared_experts") * integer(values, "moe_intermediate_size")
            values["shared_intermediate_size"] = wide
        return super().read_config(with_mixture(values, range(first, num_layers(values)), cls.default_experts))


class Dots1Block(BiasedMixtureBlock):
    """Each head of q and k is normed."""

    attention = Qwen3Attention


class Dots1ForCausalLM(Glm4MoeForCausalLM):
    """dots.llm1."""

    block = Dots1Block
    config_class = MixtureConfig
    config_defaults = {"first_k_dense_replace": 0, "norm_topk_prob": False}
    default_experts = None

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Layers from `max_window_layers` on slide, if there is a window."""
        values = dict(raw)
        if values.get("layer_types") is None:
            first = 0 if values.get("max_window_layers") == 0 else positive(values, "max_window_layers", 62)
            values["layer_types"] = [SLIDING if i >= first else FULL for i in range(num_layers(values))]
        return super().read_config(values)


class SolarOpenBlock(BiasedMixtureBlock):
    """Llama's attention."""


class SolarOpenForCausalLM(Glm4MoeForCausalLM):
    """Solar Open: every layer is a mixture."""

    block = SolarOpenBlock
    config_class = MixtureConfig
    config_defaults = {
        "head_dim": 128,
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1280,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """There is no dense layer, whose width files leave out."""
        return super().read_config({"intermediate_size": 1, **raw, "first_k_dense_replace": 0})
