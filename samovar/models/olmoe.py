"""OLMoE and FlexOlmo. Read beside transformers/models/olmoe/modeling_olmoe.py and flex_olmo/modeling_flex_olmo.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import nn

from samovar.errors import CheckpointError
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers
from samovar.models.mixture import MixtureBlock, MixtureConfig, mixture, softmax_routing, with_mixture
from samovar.models.olmo2 import Olmo2Attention, Olmo2Block


class OlmoeBlock(MixtureBlock):
    """OLMo 2's attention, normed before it; and experts."""

    attention = Olmo2Attention


class OlmoeForCausalLM(DecoderLM):
    """OLMoE."""

    block: ClassVar[type[nn.Module]] = OlmoeBlock
    config_class = MixtureConfig
    config_defaults = {"norm_topk_prob": False, "num_experts_per_tok": 8}
    default_experts: ClassVar[int] = 64

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers are mixtures, their experts as wide as `intermediate_size`."""
        values = {**cls.config_defaults, **raw}
        if values.get("clip_qkv") is not None:
            raise CheckpointError(f"config.json: clip_qkv {values['clip_qkv']!r} is not supported: only null is")
        values["moe_intermediate_size"] = values.get("intermediate_size")
        return super().read_config(with_mixture(values, range(num_layers(values)), cls.default_experts))


class FlexOlmoBlock(Olmo2Block):
    """Attention and experts, each normed after it."""

    def __init__(self, c: MixtureConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.mlp = mixture(c, softmax_routing(c))


class FlexOlmoForCausalLM(OlmoeForCausalLM):
    """FlexOlmo."""

    block = FlexOlmoBlock
    config_defaults = {"norm_topk_prob": False, "num_experts_per_tok": 5}
    default_experts = 7
