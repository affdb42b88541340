"""Qwen3.5 and 3.6, dense and with experts: Qwen3-Next's layers under other names. Checkpoints hold a model that sees; its text
model is what runs. Read beside transformers/models/qwen3_5/modeling_qwen3_5.py and qwen3_5_moe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from samovar.layers import Router, SharedGate, SparseMLP
from samovar.layers.found_experts import FoundExperts
from samovar.layers.mlp import GatedMLP
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.delta import DELTA_DEFAULTS, DeltaBlock, DeltaConfig, DeltaMixtureConfig, with_delta
from samovar.models.fields import num_layers, text_fields
from samovar.models.mixture import softmax_routing, with_mixture

UNREAD = ("mtp.", "model.visual.")
"""Layers that draft, and eyes."""
SEEING = {"model": "model.language_model"}
"""The text model in a checkpoint that has eyes, too."""


class Qwen35ForCausalLM(DecoderLM):
    """Qwen3.5, text."""

    block: ClassVar[type[nn.Module]] = DeltaBlock
    config_class: ClassVar[type[DecoderConfig]] = DeltaConfig
    config_defaults: ClassVar[dict[str, Any]] = DELTA_DEFAULTS
    renames: ClassVar[dict[str, str]] = {}
    ignore_beginnings = UNREAD
    norm_offset = True

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Every fourth layer attends, unless the file says otherwise."""
        return super().read_config(with_delta({**cls.config_defaults, **text_fields(raw)}))


class Qwen35ForConditionalGeneration(Qwen35ForCausalLM):
    """Qwen3.5 and 3.6 as published: images are not read."""

    renames = SEEING


class Qwen35MoeBlock(DeltaBlock):
    """Experts, and beside them a network for every token, which a gate weighs."""

    def make_mlp(self, c: DeltaConfig | DeltaMixtureConfig, layer: int) -> nn.Module:
        """See `DeltaBlock`."""
        if not isinstance(c, DeltaMixtureConfig):
            return super().make_mlp(c, layer)
        return SparseMLP(
            Router(c.hidden_size, c.num_experts, softmax_routing(c)),
            FoundExperts(c.hidden_size, c.moe_intermediate_size, c.num_experts, c.hidden_act),
            GatedMLP(c.hidden_size, c.shared_intermediate_size or c.moe_intermediate_size, c.hidden_act),
            SharedGate(c.hidden_size),
        )


class Qwen35MoeForCausalLM(Qwen35ForCausalLM):
    """Qwen3.5 with experts, text."""

    block = Qwen35MoeBlock
    config_class = DeltaMixtureConfig
    config_defaults = {
        **DELTA_DEFAULTS,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8,
    }
    renames = {"mlp.shared_experts": "mlp.shared_expert"}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers have experts."""
        values = {**cls.config_defaults, **text_fields(raw)}
        values["shared_intermediate_size"] = values["shared_expert_intermediate_size"]
        values.setdefault("intermediate_size", values["moe_intermediate_size"])
        return super().read_config(with_mixture(values, range(num_layers(values)), 256))


class Qwen35MoeForConditionalGeneration(Qwen35MoeForCausalLM):
    """Qwen3.5 and 3.6 with experts as published: images are not read."""

    renames = {**Qwen35MoeForCausalLM.renames, **SEEING}
