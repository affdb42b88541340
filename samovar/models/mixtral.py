"""Mixtral. Read beside transformers/models/mixtral/modeling_mixtral.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers
from samovar.models.mixture import MixtureBlock, MixtureConfig, with_mixture

MIXTRAL_NAMES = {"mlp": "block_sparse_moe", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
"""Our names -> those of checkpoints in Mixtral's layout."""


class MixtralForCausalLM(DecoderLM):
    """Mixtral: Mistral with experts for MLPs; weights of the chosen are a softmax over them."""

    block = MixtureBlock
    config_class = MixtureConfig
    config_defaults = {"num_experts_per_tok": 2}
    renames = MIXTRAL_NAMES

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers alike: experts as wide as `intermediate_size`, and sliding if there is a window."""
        values = {**cls.config_defaults, **raw}
        kind = FULL if values.get("sliding_window") is None else SLIDING
        values |= {"layer_types": [kind] * num_layers(values), "norm_topk_prob": True}
        values["moe_intermediate_size"] = values.get("intermediate_size")
        return super().read_config(with_mixture(values, range(num_layers(values)), 8))
