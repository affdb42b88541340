"""DeepSeek V3, V3.1, R1 and Kimi K2, which have one architecture; and its relatives GLM-4.7-Flash and Youtu-LLM.

Read beside transformers/models/deepseek_v3, glm4_moe_lite and youtu.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from samovar.errors import CheckpointError
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.deepseek_v2 import DeepseekV2ForCausalLM
from samovar.models.fields import num_layers
from samovar.models.latent import LatentBlock, LatentConfig, LatentSelfAttention, with_latent
from samovar.models.mixture import BiasedMixtureBlock

SIZES = {"kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


class DeepseekV3Block(BiasedMixtureBlock):
    """Latent attention, and experts in all but the first layers."""

    attention: type[nn.Module] = LatentSelfAttention


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """DeepSeek V3."""

    block: ClassVar[type[nn.Module]] = DeepseekV3Block
    config_defaults: ClassVar[dict[str, Any]] = {
        **SIZES,
        "first_k_dense_replace": 3,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    default_experts = 256
    topk_methods = ("noaux_tc",)
    scoring = "sigmoid"
    scales_sums = True


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash."""

    config_defaults = {
        **SIZES,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1536,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
    }
    default_experts = 64

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """`mlp_layer_types` says which layers are mixtures: all but some of the first."""
        kinds = raw.get("mlp_layer_types")
        if kinds is None:
            return super().read_config(raw)
        count = num_layers(raw)
        dense = len(kinds) - kinds.count("sparse") if isinstance(kinds, list) else -1
        if kinds != ["dense"] * dense + ["sparse"] * (count - dense):
            raise CheckpointError(f"config.json: mlp_layer_types must be dense layers, then sparse ones, got {kinds!r}")
        return super().read_config({**raw, "first_k_dense_replace": dense})


class YoutuForCausalLM(DecoderLM):
    """Youtu-LLM: dense."""

    block = LatentBlock
    config_class = LatentConfig
    config_defaults = {**SIZES, "tie_word_embeddings": True}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Latent attention as in DeepSeek V3."""
        return super().read_config(with_latent({**cls.config_defaults, **raw}))
