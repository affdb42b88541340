"""Jamba: Mamba and some attention, with experts in some layers. Read beside transformers/models/jamba/modeling_jamba.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import integer, num_layers
from samovar.models.hybrid import HybridBlock, NoRopeAttention, attention_at, with_mixers
from samovar.models.mamba import MambaMixer, MambaSizes, NormedMambaMixer
from samovar.models.mixture import MixtureConfig, mixture, softmax_routing, with_mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class JambaConfig(MixtureConfig):
    """`mixers` has the kind of every layer."""

    mixers: tuple[str, ...]
    selective: MambaSizes


class JambaBlock(HybridBlock):
    """Attention without rope or Mamba, and an MLP or experts."""

    attention = NoRopeAttention

    def __init__(self, c: JambaConfig, layer: int) -> None:
        super().__init__(c, layer)
        if layer in c.sparse_layers:
            self.mlp = mixture(c, softmax_routing(c))

    def recurrent(self, c: JambaConfig) -> MambaMixer:
        """Mamba with norms."""
        return NormedMambaMixer(c.selective, c.rms_norm_eps)


class JambaForCausalLM(DecoderLM):
    """Jamba."""

    block = JambaBlock
    config_class = JambaConfig
    config_defaults = {
        "num_experts": 16,
        "num_experts_per_tok": 2,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_dt_rank": "auto",
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }
    renames = {
        "model.norm": "model.final_layernorm",
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp.gate": "feed_forward.router",
        "mlp": "feed_forward",
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Attention, and experts, come once in a period. A single expert is none."""
        values = {**cls.config_defaults, **raw, "norm_topk_prob": False}
        values["moe_intermediate_size"] = values.get("intermediate_size")
        hidden, rank = integer(values, "hidden_size"), values["mamba_dt_rank"]
        values["selective"] = MambaSizes(
            hidden=hidden,
            inner=integer(values, "mamba_expand") * hidden,
            state=integer(values, "mamba_d_state"),
            rank=-(-hidden // 16) if rank == "auto" else integer(values, "mamba_dt_rank"),
            conv_width=integer(values, "mamba_d_conv"),
            has_conv_bias=bool(values["mamba_conv_bias"]),
            has_bias=bool(values["mamba_proj_bias"]),
        )
        if values["num_experts"] == 1:
            values["num_experts_per_tok"] = 1
        sparse = layers_of(values, "expert_layer") if values["num_experts"] != 1 else []
        values = with_mixers(values, attention_at(values, layers_of(values, "attn_layer")))
        return super().read_config(with_mixture(values, sparse))


def layers_of(values: Mapping[str, Any], name: str) -> list[int]:
    """Layers that stand at an offset of a period."""
    offset = 0 if values[f"{name}_offset"] == 0 else integer(values, f"{name}_offset")
    return [i for i in range(num_layers(values)) if i % integer(values, f"{name}_period") == offset]
