"""LFM2 with experts. Read beside transformers/models/lfm2_moe/modeling_lfm2_moe.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samovar.layers import Routing
from samovar.models.config import DecoderConfig
from samovar.models.fields import integer, num_layers
from samovar.models.lfm2 import Lfm2Block, Lfm2ForCausalLM
from samovar.models.mixture import MixtureConfig, mixture, with_mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2MoeConfig(MixtureConfig):
    """The same for a mixture; `use_expert_bias` decides who is chosen."""

    mixers: tuple[str, ...]
    conv_width: int
    conv_bias: bool = False
    use_expert_bias: bool = True


class Lfm2MoeBlock(Lfm2Block):
    """Experts but in the first layers."""

    def __init__(self, c: Lfm2MoeConfig, layer: int) -> None:
        super().__init__(c, layer)
        if layer in c.sparse_layers:
            routing = Routing(
                top_k=c.num_experts_per_tok,
                scoring="sigmoid",
                renormalize=c.norm_topk_prob,
                scale=c.routed_scaling_factor,
                bias="expert_bias" if c.use_expert_bias else None,
            )
            self.feed_forward = mixture(c, routing)


class Lfm2MoeForCausalLM(Lfm2ForCausalLM):
    """LFM2 with experts."""

    block = Lfm2MoeBlock
    config_class = Lfm2MoeConfig
    config_defaults = {
        **Lfm2ForCausalLM.config_defaults,
        "num_dense_layers": 2,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1792,
    }
    renames = {
        **Lfm2ForCausalLM.renames,
        "feed_forward.gate.expert_bias": "feed_forward.expert_bias",
        **{f"{ours}_proj": theirs for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))},
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Layers from `num_dense_layers` on are mixtures."""
        values = {**cls.config_defaults, **raw}
        first = 0 if values["num_dense_layers"] == 0 else integer(values, "num_dense_layers")
        return super().read_config(with_mixture(values, range(first, num_layers(values)), 32))

    @classmethod
    def inner_size(cls, values: Mapping[str, Any]) -> int:
        """As the file has it."""
        return integer(values, "intermediate_size")
