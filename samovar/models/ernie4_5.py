"""ERNIE 4.5, dense and with experts. Read beside transformers/models/ernie4_5 and ernie4_5_moe."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from samovar.layers import Experts, GatedMLP, QKVLinear, Router, Routing, Source, SparseMLP
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import integer, num_layers, positive
from samovar.models.llama import LlamaAttention, LlamaBlock
from samovar.models.mixture import MixtureBlock, MixtureConfig, with_mixture

ROPE = {"rope_theta": 500_000.0}


class ErnieAttention(LlamaAttention):
    """Llama's attention; rope pairs neighbours."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        sizes = (c.hidden_size, c.num_attention_heads, c.num_key_value_heads, c.head_dim)
        self.qkv_proj = QKVLinear(*sizes, bias=c.attention_bias, num_paired=c.head_dim)


class ErnieBlock(LlamaBlock):
    """Pre-norm attention and MLP."""

    attention = ErnieAttention


class ErnieForCausalLM(DecoderLM):
    """ERNIE 4.5, dense."""

    block = ErnieBlock
    config_defaults = {"tie_word_embeddings": True, "head_dim": 128, **ROPE}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """One option for all biases."""
        return super().read_config(with_biases(raw))


def with_biases(raw: Mapping[str, Any]) -> dict[str, Any]:
    """`use_bias` under the names it has elsewhere."""
    has_bias = raw.get("use_bias") or False
    return {**raw, "attention_bias": has_bias, "mlp_bias": has_bias}


class ErnieRouter(Router):
    """Its checkpoint has the bias of the choice as a row."""

    def sources(self) -> list[Source]:
        """See `Router`."""
        return [
            dataclasses.replace(source, target=source.target[None]) if source.target is self.choice_bias else source
            for source in super().sources()
        ]


class ErnieMoeBlock(MixtureBlock):
    """Experts are chosen by softmax scores and a bias; beside them is a network for every token."""

    attention = ErnieAttention

    def mixture(self, c: MixtureConfig) -> SparseMLP:
        """See `MixtureBlock`."""
        wide = c.shared_intermediate_size
        routing = Routing(top_k=c.num_experts_per_tok, least=1e-12, bias="moe_statics.e_score_correction_bias")
        return SparseMLP(
            ErnieRouter(c.hidden_size, c.num_experts, routing),
            Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts, c.hidden_act),
            None if wide is None else GatedMLP(c.hidden_size, wide, c.hidden_act),
        )


class ErnieMoeForCausalLM(DecoderLM):
    """ERNIE 4.5 with experts. Layers that guess further tokens are left unread."""

    block = ErnieMoeBlock
    config_class = MixtureConfig
    config_defaults = {
        "tie_word_embeddings": True,
        "moe_intermediate_size": 1536,
        "moe_k": 6,
        "moe_num_experts": 64,
        "moe_num_shared_experts": 2,
        **ROPE,
    }
    renames = {"mlp.gate.moe_statics": "mlp.moe_statics"}
    ignore_beginnings = ("model.mtp_",)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Every `moe_layer_interval`th layer between two is a mixture."""
        values = with_biases({**cls.config_defaults, **raw})
        count, every = num_layers(values), positive(values, "moe_layer_interval", 1)
        first = 0 if values.get("moe_layer_start_index") == 0 else positive(values, "moe_layer_start_index", 1)
        last = values.get("moe_layer_end_index", -1)
        last = (
            count - 1 if last is None or last == -1 else 0 if last == 0 else positive(values, "moe_layer_end_index", 0)
        )
        values |= {"num_experts": values["moe_num_experts"], "num_experts_per_tok": values["moe_k"]}
        if values.get("moe_num_shared_experts"):
            wide = integer(values, "moe_num_shared_experts") * integer(values, "moe_intermediate_size")
            values["shared_intermediate_size"] = wide
        sparse = [i for i in range(count) if (i + 1) % every == 0 and first <= i <= last]
        return super().read_config(with_mixture(values, sparse))
