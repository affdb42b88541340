"""Mistral 4: latent attention whose queries grow with their position, and experts chosen by softmax.

Read beside transformers/models/mistral4.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samovar.layers import ExpertStorage, PositionScale, Routing, SparseMLP
from samovar.models.config import DecoderConfig
from samovar.models.deepseek_v2 import DeepseekV2Block, DeepseekV2ForCausalLM, LatentMixtureConfig
from samovar.models.fields import section
from samovar.models.latent import LatentSelfAttention
from samovar.models.mixture import MixtureConfig, mixture


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistral4Config(LatentMixtureConfig):
    """`llama_4_scaling_beta` is the strength of the queries' growth, in steps of the length that was trained; None: they do
    not grow."""

    llama_4_scaling_beta: float | None = None


class Mistral4Attention(LatentSelfAttention):
    """Latent attention."""

    def __init__(self, c: Mistral4Config, layer: int) -> None:
        super().__init__(c, layer)
        trained = c.rope_of(layer).original_max_position_embeddings
        if c.llama_4_scaling_beta is not None and trained is not None:
            self.growth = PositionScale(c.llama_4_scaling_beta, trained)


class Mistral4Block(DeepseekV2Block):
    """Scores are a softmax over all experts; a group of them is as good as its two best together. The checkpoint holds those
    of a layer in one tensor."""

    attention = Mistral4Attention

    def mixture(self, c: MixtureConfig) -> SparseMLP:
        """See `MixtureBlock`."""
        routing = Routing(
            top_k=c.num_experts_per_tok,
            renormalize=c.norm_topk_prob,
            scale=c.routed_scaling_factor,
            groups=c.n_group,
            top_groups=c.topk_group,
        )
        return mixture(c, routing, ExpertStorage(stacked=True, bare=True))


class Mistral4ForCausalLM(DeepseekV2ForCausalLM):
    """Mistral 4."""

    block = Mistral4Block
    config_class = Mistral4Config
    config_defaults = {
        "kv_lora_rank": 256,
        "q_lora_rank": 1024,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "first_k_dense_replace": 0,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "group_limited_greedy",
        "scoring_func": "softmax",
    }
    default_experts = 128
    scales_sums = True

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """The growth of queries is said among the fields of rope; how much of a head turns is said twice."""
        rope = section(raw, "rope_parameters")
        rope.pop("partial_rotary_factor", None)
        values = {**raw, "rope_parameters": rope}
        if rope.get("llama_4_scaling_beta") is not None:
            values["llama_4_scaling_beta"] = rope["llama_4_scaling_beta"]
        return super().read_config(values)
