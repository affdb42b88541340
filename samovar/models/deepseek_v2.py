"""DeepSeek V2, V2.5 and V2-Lite: latent attention, and experts chosen by softmax, from some groups of them or from all.

Read beside transformers/models/deepseek_v2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from samovar.errors import CheckpointError
from samovar.layers import Routing, SparseMLP
from samovar.models.config import DecoderConfig
from samovar.models.fields import positive
from samovar.models.glm4_moe import Glm4MoeForCausalLM
from samovar.models.latent import LatentFields, LatentSelfAttention, with_latent
from samovar.models.mixture import MixtureBlock, MixtureConfig, mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentMixtureConfig(MixtureConfig):
    """Latent attention and experts."""

    latent: LatentFields


class DeepseekV2Block(MixtureBlock):
    """Scores are a softmax over all experts; a group of them is as good as its best one."""

    attention: type[nn.Module] = LatentSelfAttention

    def mixture(self, c: MixtureConfig) -> SparseMLP:
        """See `MixtureBlock`."""
        routing = Routing(
            top_k=c.num_experts_per_tok,
            renormalize=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
            groups=c.n_group,
            top_groups=c.topk_group,
            group_best=1,
        )
        return mixture(c, routing)


class DeepseekV2ForCausalLM(Glm4MoeForCausalLM):
    """DeepSeek V2. Layers behind the last, which guess further tokens, are left unread."""

    block: ClassVar[type[nn.Module]] = DeepseekV2Block
    config_class: ClassVar[type[DecoderConfig]] = LatentMixtureConfig
    config_defaults: ClassVar[dict[str, Any]] = {
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
        "moe_intermediate_size": 1407,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "topk_method": "greedy",
        "scoring_func": "softmax",
    }
    default_experts = 64
    topk_methods: ClassVar[tuple[str, ...]] = ("greedy", "group_limited_greedy")
    scoring: ClassVar[str] = "softmax"
    scales_sums: ClassVar[bool] = False
    """Whether weights that were divided by their sum are scaled, too."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        # One layer, or with more of them up to ten: none of a model that has more layers than it says.
        first = config.num_hidden_layers
        self.ignore_beginnings = tuple(f"model.layers.{layer}." for layer in range(first, first + FURTHER_LAYERS))

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Names of choices that are another mathematics are refused."""
        values = {**cls.config_defaults, **raw}
        _expect(values, "topk_method", cls.topk_methods)
        _expect(values, "scoring_func", (cls.scoring,))
        if positive(values, "moe_layer_freq", 1) != 1:
            raise CheckpointError(f"config.json: moe_layer_freq {values['moe_layer_freq']} is not supported, only 1 is")
        if values["topk_method"] == "greedy":
            values |= {"n_group": 1, "topk_group": 1}
        if not cls.scales_sums and values["norm_topk_prob"]:
            values["routed_scaling_factor"] = 1.0  # weights that add up to one are not scaled
        return super().read_config(with_latent(values))


FURTHER_LAYERS = 4
"""Most layers behind the last that guess further tokens."""


def _expect(values: Mapping[str, Any], name: str, known: tuple[str, ...]) -> None:
    if values.get(name) not in (None, *known):
        raise CheckpointError(f"config.json: {name} {values[name]!r} is not supported; there are {', '.join(known)}")
