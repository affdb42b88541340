"""gpt-oss. Read beside transformers/models/gpt_oss/modeling_gpt_oss.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samovar.errors import CheckpointError
from samovar.kernels.expert_products import CLAMPED_ALPHA
from samovar.layers import Attention, Experts, ExpertStorage, Router, SparseMLP
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers
from samovar.models.llama import LlamaAttention
from samovar.models.mixture import MixtureBlock, MixtureConfig, softmax_routing, with_mixture

STORAGE = ExpertStorage(stacked=True, bare=True, transposed=True, interleaved=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class GptOssConfig(MixtureConfig):
    """`swiglu_limit` bounds gate and up of an expert."""

    swiglu_limit: float


class GptOssAttention(LlamaAttention):
    """Llama's attention with biases, and one score for each head that takes weight and gives nothing."""

    def __init__(self, c: GptOssConfig, layer: int) -> None:
        super().__init__(c, layer)
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.attn = Attention(heads, kv_heads, c.head_dim, window=c.window_of(layer), has_sinks=True)


class GptOssBlock(MixtureBlock):
    """Experts with biases, of which the checkpoint holds gate and up in turns."""

    attention = GptOssAttention

    def mixture(self, c: MixtureConfig) -> SparseMLP:
        """See `MixtureBlock`."""
        assert isinstance(c, GptOssConfig)
        sizes = (c.hidden_size, c.moe_intermediate_size, c.num_experts)
        return SparseMLP(
            Router(c.hidden_size, c.num_experts, softmax_routing(c), bias=True),
            Experts(*sizes, "clamped", bias=True, limit=c.swiglu_limit, storage=STORAGE),
        )


class GptOssForCausalLM(DecoderLM):
    """gpt-oss: every other layer slides."""

    block = GptOssBlock
    config_class = GptOssConfig
    config_defaults = {
        "head_dim": 64,
        "sliding_window": 128,
        "attention_bias": True,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "swiglu_alpha": CLAMPED_ALPHA,
    }
    renames = {"mlp.gate": "mlp.router"}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers are mixtures, their experts as wide as `intermediate_size`."""
        values = {**cls.config_defaults, **raw, "norm_topk_prob": True}
        if values["swiglu_alpha"] != CLAMPED_ALPHA:
            raise CheckpointError(
                f"config.json: swiglu_alpha {values['swiglu_alpha']!r} is not supported: only {CLAMPED_ALPHA} is"
            )
        if values.get("layer_types") is None:
            values["layer_types"] = [FULL if i % 2 else SLIDING for i in range(num_layers(values))]
        values["moe_intermediate_size"] = values.get("intermediate_size")
        return super().read_config(with_mixture(values, range(num_layers(values)), 128))
