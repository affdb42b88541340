"""Arcee's Trinity (AFMoE). Read beside transformers/models/afmoe/modeling_afmoe.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samovar.layers import Activation, ColumnLinear, ForwardBatch, Routing
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import integer, num_layers, positive
from samovar.models.glm import Glm4Block
from samovar.models.mixture import MixtureConfig, mixture, with_mixture
from samovar.models.qwen3 import Qwen3Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class AfmoeConfig(MixtureConfig):
    """`mup_enabled`: embeddings are multiplied by the root of the hidden size."""

    mup_enabled: bool = False


class AfmoeAttention(Qwen3Attention):
    """Each head of q and k is normed, full layers have no rope, and what attention gives is gated."""

    def __init__(self, c: AfmoeConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.has_rope = c.window_of(layer) is not None
        self.gate_proj, self.sigmoid = (
            ColumnLinear(c.hidden_size, c.num_attention_heads * c.head_dim),
            Activation("sigmoid"),
        )

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        gate = self.sigmoid(self.gate_proj(x))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.has_rope:
            q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch) * gate)
        return y


class AfmoeBlock(Glm4Block):
    """Norms before and behind attention and what follows: a dense network, then in most layers experts."""

    attention = AfmoeAttention
    stored_fused = False

    def __init__(self, c: AfmoeConfig, layer: int) -> None:
        super().__init__(c, layer)
        if layer in c.sparse_layers:
            routing = Routing(
                top_k=c.num_experts_per_tok, scoring="sigmoid", scale=c.routed_scaling_factor, bias="expert_bias"
            )
            self.mlp = mixture(c, routing)


class AfmoeForCausalLM(DecoderLM):
    """Trinity."""

    block = AfmoeBlock
    config_class = AfmoeConfig
    config_defaults = {
        "head_dim": 128,
        "moe_intermediate_size": 1408,
        "num_experts": 64,
        "num_experts_per_tok": 6,
        "num_shared_experts": 2,
        "route_scale": 1.0,
        "sliding_window": 1024,
    }
    renames = {
        "post_attention_layernorm": "pre_mlp_layernorm",
        "post_self_attn_layernorm": "post_attention_layernorm",
        "mlp.gate.expert_bias": "mlp.expert_bias",
        "mlp.gate": "mlp.router.gate",
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Three sliding layers, then a full one; the first layers are dense."""
        values = {**cls.config_defaults, **raw}
        every, layers = positive(values, "global_attn_every_n_layers", 4), range(num_layers(values))
        values["layer_types"] = values.get("layer_types") or [SLIDING if (i + 1) % every else FULL for i in layers]
        first = 0 if values.get("num_dense_layers") == 0 else positive(values, "num_dense_layers", 1)
        if values["num_shared_experts"]:
            wide = integer(values, "num_shared_experts") * integer(values, "moe_intermediate_size")
            values["shared_intermediate_size"] = wide
        values |= {"norm_topk_prob": True, "routed_scaling_factor": values["route_scale"]}
        return super().read_config(with_mixture(values, layers[first:]))

    def embed_scale(self, config: DecoderConfig) -> float | None:
        """See `AfmoeConfig`."""
        assert isinstance(config, AfmoeConfig)
        return float(config.hidden_size**0.5) if config.mup_enabled else None
