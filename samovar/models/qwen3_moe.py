"""Qwen3-MoE. Read beside transformers/models/qwen3_moe/modeling_qwen3_moe.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samovar.errors import CheckpointError
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers, positive
from samovar.models.mixture import MixtureBlock, MixtureConfig, with_mixture
from samovar.models.qwen3 import Qwen3Attention


class Qwen3MoeBlock(MixtureBlock):
    """Qwen3's attention, and experts."""

    attention = Qwen3Attention


class Qwen3MoeForCausalLM(DecoderLM):
    """Qwen3-MoE."""

    block = Qwen3MoeBlock
    config_class = MixtureConfig
    config_defaults = {"norm_topk_prob": False, "moe_intermediate_size": 768, "num_experts_per_tok": 8}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers slide, if sliding is switched on."""
        values = {**cls.config_defaults, **raw}
        if not values.get("use_sliding_window", False):
            values["sliding_window"] = None
        kind = FULL if values.get("sliding_window") is None else SLIDING
        values["layer_types"] = [kind] * num_layers(values)
        return super().read_config(with_mixture(values, qwen_sparse_layers(values), 128))


def qwen_sparse_layers(values: Mapping[str, Any]) -> list[int]:
    """Every `decoder_sparse_step`th layer, but for `mlp_only_layers`."""
    every, dense = positive(values, "decoder_sparse_step", 1), values.get("mlp_only_layers") or []
    if not isinstance(dense, (list, tuple)):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list, got {dense!r}")
    return [i for i in range(num_layers(values)) if i not in dense and (i + 1) % every == 0]
