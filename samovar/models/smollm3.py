"""SmolLM3. Read beside transformers/models/smollm3/modeling_smollm3.py: same names, same order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samovar.errors import CheckpointError
from samovar.layers import ForwardBatch
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers, positive
from samovar.models.llama import LlamaAttention, LlamaBlock


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM3Config(DecoderConfig):
    """`no_rope_layers` has one entry per layer: 0 where there is no rope, 1 where there is (sic)."""

    no_rope_layers: tuple[int, ...]


class SmolLM3Attention(LlamaAttention):
    """Llama's attention; some layers have no rope."""

    def __init__(self, c: SmolLM3Config, layer: int) -> None:
        super().__init__(c, layer)
        self.has_rope = bool(c.no_rope_layers[layer])

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        if self.has_rope:
            q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class SmolLM3Block(LlamaBlock):
    """Pre-norm attention and MLP."""

    attention = SmolLM3Attention


class SmolLM3ForCausalLM(DecoderLM):
    """SmolLM3."""

    block = SmolLM3Block
    config_class = SmolLM3Config
    config_defaults = {"tie_word_embeddings": True, "rope_theta": 2_000_000.0}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Without lists, every fourth layer has no rope, and it slides if sliding is switched on."""
        values, layers = dict(raw), range(num_layers(raw))
        every = positive(values, "no_rope_layer_interval", 4)
        has_rope = values.get("no_rope_layers") or [int((i + 1) % every != 0) for i in layers]
        if not isinstance(has_rope, (list, tuple)) or len(has_rope) != len(layers):
            raise CheckpointError(f"config.json: no_rope_layers must have {len(layers)} entries, got {has_rope!r}")
        slides = values.get("use_sliding_window", False)
        if not slides:
            values["sliding_window"] = None
        values["no_rope_layers"] = has_rope
        if values.get("layer_types") is None:
            values["layer_types"] = [SLIDING if slides and not has_rope[i] else FULL for i in layers]
        return super().read_config(values)
