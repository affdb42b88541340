"""Bamba: Mamba2 and some attention. Read beside transformers/models/bamba/modeling_bamba.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.hybrid import HybridBlock, HybridConfig, attention_at, with_mixers
from samovar.models.state_space import BAMBA_DEFAULTS, bamba_sizes


class BambaForCausalLM(DecoderLM):
    """Bamba: half of every head is rotated."""

    block = HybridBlock
    config_class = HybridConfig
    config_defaults = {**BAMBA_DEFAULTS, "partial_rotary_factor": 0.5}
    renames = {
        "model.norm": "model.final_layernorm",
        "post_attention_layernorm": "pre_ff_layernorm",
        "mlp": "feed_forward",
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Attention stands at `attn_layer_indices`."""
        values = {**cls.config_defaults, **raw}
        kinds = attention_at(values, values.get("attn_layer_indices") or ())
        return super().read_config({**with_mixers(values, kinds), "state_space": bamba_sizes(values)})
