"""Qwen2 and Qwen2.5 dense. Read beside transformers/models/qwen2/modeling_qwen2.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samovar.layers import QKVLinear, RowLinear
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers, positive
from samovar.models.llama import LlamaAttention, LlamaBlock


class Qwen2Attention(LlamaAttention):
    """Llama's attention with biases on q, k and v, and none on the output."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, bias=True)
        self.o_proj = RowLinear(heads * dim, c.hidden_size)


class Qwen2Block(LlamaBlock):
    """Pre-norm attention and MLP."""

    attention = Qwen2Attention


class Qwen2ForCausalLM(DecoderLM):
    """Qwen2."""

    block = Qwen2Block

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Layers from `max_window_layers` on slide, if sliding is switched on."""
        return super().read_config(with_window_layers(raw))


def with_window_layers(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Qwen's older way to say which layers slide, as `layer_types`."""
    values = dict(raw)
    if not values.get("use_sliding_window", False):
        values["sliding_window"] = None
    if values.get("layer_types") is None:
        first = 0 if values.get("max_window_layers") == 0 else positive(values, "max_window_layers", 28)
        values["layer_types"] = [SLIDING if i >= first else FULL for i in range(num_layers(values))]
    return values
