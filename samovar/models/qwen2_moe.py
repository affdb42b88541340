"""Qwen2-MoE and Qwen1.5-MoE. Read beside transformers/models/qwen2_moe/modeling_qwen2_moe.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samovar.layers import QKVLinear, RowLinear, SharedGate, SparseMLP
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers, positive
from samovar.models.llama import LlamaAttention
from samovar.models.mixture import MixtureBlock, MixtureConfig, with_mixture
from samovar.models.qwen3_moe import qwen_sparse_layers


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2MoeConfig(MixtureConfig):
    """`qkv_bias`: whether q, k and v have biases."""

    qkv_bias: bool = True


class Qwen2MoeAttention(LlamaAttention):
    """Llama's attention with biases on q, k and v, and none on the output."""

    def __init__(self, c: Qwen2MoeConfig, layer: int) -> None:
        super().__init__(c, layer)
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.qkv_bias)
        self.o_proj = RowLinear(heads * dim, c.hidden_size)


class Qwen2MoeBlock(MixtureBlock):
    """Experts, and beside them a network for every token, which a gate weighs."""

    attention = Qwen2MoeAttention

    def mixture(self, c: MixtureConfig) -> SparseMLP:
        """See `MixtureBlock`."""
        plain = super().mixture(c)
        return SparseMLP(plain.gate, plain.experts, plain.shared_experts, SharedGate(c.hidden_size))


class Qwen2MoeForCausalLM(DecoderLM):
    """Qwen2-MoE."""

    block = Qwen2MoeBlock
    config_class = Qwen2MoeConfig
    config_defaults = {
        "norm_topk_prob": False,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts_per_tok": 4,
    }
    renames = {"mlp.shared_experts": "mlp.shared_expert"}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Every other layer below `max_window_layers` slides, if sliding is switched on."""
        values = {**cls.config_defaults, **raw}
        values["shared_intermediate_size"] = values["shared_expert_intermediate_size"]
        is_sliding = values.get("use_sliding_window", False)
        if not is_sliding:
            values["sliding_window"] = None
        if values.get("layer_types") is None:
            below = positive(values, "max_window_layers", 28) if is_sliding else 0
            kinds = [SLIDING if i % 2 == 0 and i < below else FULL for i in range(num_layers(values))]
            values["layer_types"] = kinds
        return super().read_config(with_mixture(values, qwen_sparse_layers(values), 60))
