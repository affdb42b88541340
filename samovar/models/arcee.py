"""Arcee's AFM, and Apertus: Llama with an MLP that gates nothing. Read beside transformers/models/arcee and apertus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from samovar.errors import CheckpointError
from samovar.layers import MLP, ExpandedIntegral
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.llama import LlamaBlock
from samovar.models.qwen3 import Qwen3Attention


class ArceeBlock(LlamaBlock):
    """Llama's block; the MLP squares what is above zero."""

    def feed_forward(self, c: DecoderConfig) -> nn.Module:
        """See `LlamaBlock`."""
        return MLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)


class ArceeForCausalLM(DecoderLM):
    """AFM."""

    block = ArceeBlock
    config_defaults = {"hidden_act": "relu2"}


class ApertusBlock(LlamaBlock):
    """Each head of q and k is normed; the MLP's activation has learned slopes."""

    attention = Qwen3Attention

    def feed_forward(self, c: DecoderConfig) -> nn.Module:
        """See `LlamaBlock`."""
        return MLP(c.hidden_size, c.intermediate_size, ExpandedIntegral())


class ApertusForCausalLM(DecoderLM):
    """Apertus."""

    block = ApertusBlock
    config_defaults = {
        "hidden_act": "xielu",
        "rope_theta": 12_000_000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    }
    renames = {"input_layernorm": "attention_layernorm", "post_attention_layernorm": "feedforward_layernorm"}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Its activation is the only one that there is."""
        found = super().read_config(raw)
        if found.hidden_act != "xielu":
            raise CheckpointError(f"config.json: hidden_act {found.hidden_act!r} is not supported: only 'xielu' is")
        return found
