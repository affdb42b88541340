"""Granite 4, hybrid: Mamba2 and some attention, with experts or without.

Read beside transformers/models/granitemoehybrid/modeling_granitemoehybrid.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samovar.layers import ExpertStorage, ForwardBatch, GatedMLP
from samovar.models.config import DecoderConfig
from samovar.models.fields import integer, num_layers
from samovar.models.granite import MULTIPLIERS, GraniteAttention, GraniteForCausalLM, GraniteMoeSharedForCausalLM
from samovar.models.hybrid import HybridBlock, HybridMixtureConfig, with_mixers
from samovar.models.mixture import mixture, softmax_routing, with_mixture
from samovar.models.state_space import BAMBA_DEFAULTS, bamba_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(HybridMixtureConfig):
    """The factors of `GraniteConfig`; `position_embedding_type` is "rope" if there is rope."""

    embedding_multiplier: float
    logits_scaling: float
    residual_multiplier: float
    attention_multiplier: float
    position_embedding_type: str | None = None


class GraniteHybridAttention(GraniteAttention):
    """Granite's attention, mostly without rope."""

    def __init__(self, c: GraniteHybridConfig, layer: int) -> None:
        super().__init__(c, layer)  # type: ignore[arg-type]
        self.has_rope = c.position_embedding_type == "rope"

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        if self.has_rope:
            q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class GraniteHybridBlock(HybridBlock):
    """Either mixer, and experts beside a network for all tokens, or that alone; what is added to the stream is scaled."""

    attention = GraniteHybridAttention

    def __init__(self, c: GraniteHybridConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.factor, wide = c.residual_multiplier, c.shared_intermediate_size
        assert wide is not None, "read_config"
        shared = GatedMLP(c.hidden_size, wide, c.hidden_act, stored_fused=True)
        self.mlp = shared
        if layer in c.sparse_layers:
            self.mlp = mixture(c, softmax_routing(c), ExpertStorage(stacked=True), shared)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.mix(x, batch) * self.factor, residual)
        return self.mlp(x) * self.factor, residual


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite 4."""

    block = GraniteHybridBlock
    config_class = GraniteHybridConfig
    config_defaults = {
        **MULTIPLIERS,
        **BAMBA_DEFAULTS,
        "num_experts_per_tok": 2,
        "num_local_experts": 8,
        "shared_intermediate_size": 1024,
    }
    renames = {
        **GraniteMoeSharedForCausalLM.renames,
        "mlp.gate_up_proj": "shared_mlp.input_linear",
        "mlp.down_proj": "shared_mlp.output_linear",
    }
    config: GraniteHybridConfig  # type: ignore[assignment]

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Without experts, every layer has the network for all tokens alone."""
        values = {**cls.config_defaults, **raw, "norm_topk_prob": True}
        values["moe_intermediate_size"] = values.get("intermediate_size")
        values["shared_intermediate_size"] = integer(values, "shared_intermediate_size")
        count = num_layers(values)
        has_experts = values["num_local_experts"] != 0
        if not has_experts:
            values |= {"num_local_experts": 1, "num_experts_per_tok": 1}
        values = with_mixture(values, range(count if has_experts else 0))
        values = with_mixers(values, values.get("layer_types") or ["mamba"] * count)
        return super().read_config({**values, "state_space": bamba_sizes(values)})

    def embed_scale(self, config: DecoderConfig) -> float | None:
        """The embedding multiplier."""
        assert isinstance(config, GraniteHybridConfig)
        return config.embedding_multiplier
