"""Phi-3, Phi-3.5 and Phi-4 (mini). Read beside transformers/models/phi3/modeling_phi3.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samovar.layers import GatedMLP, QKVLinear, RowLinear
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers
from samovar.models.llama import LlamaAttention, LlamaBlock


class Phi3Attention(LlamaAttention):
    """Llama's attention; the checkpoint stores q, k and v as one tensor."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim, stored_fused=True)
        self.o_proj = RowLinear(heads * dim, c.hidden_size)


class Phi3Block(LlamaBlock):
    """Pre-norm attention and MLP; the checkpoint stores gate and up as one tensor."""

    attention = Phi3Attention

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.mlp = GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act, stored_fused=True)


class Phi3ForCausalLM(DecoderLM):
    """Phi-3."""

    block = Phi3Block
    config_defaults = {"original_max_position_embeddings": 4096}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers slide if there is a window; "su" and "yarn" are old names of longrope here."""
        values, kind = dict(raw), FULL if raw.get("sliding_window") is None else SLIDING
        values["layer_types"] = [kind] * num_layers(raw)
        for name in ("rope_parameters", "rope_scaling"):
            rope = values.get(name)
            if isinstance(rope, Mapping) and rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
                values[name] = {**rope, "rope_type": "longrope"}
        return super().read_config(values)
