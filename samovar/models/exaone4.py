"""EXAONE 4. Read beside transformers/models/exaone4/modeling_exaone4.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from samovar.layers import ForwardBatch
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers, positive
from samovar.models.olmo2 import Olmo2Block
from samovar.models.qwen3 import Qwen3Attention


class Exaone4Attention(Qwen3Attention):
    """Each head of q and k is normed; where some layers slide, the full ones have no rope."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.has_rope = c.sliding_window is None or c.window_of(layer) is not None

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        q, k = self.q_norm(q), self.k_norm(k)
        if self.has_rope:
            q, k = self.rope(q, k, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class Exaone4Block(Olmo2Block):
    """Attention and MLP, each normed after it."""

    attention = Exaone4Attention


class Exaone4ForCausalLM(DecoderLM):
    """EXAONE 4."""

    block = Exaone4Block
    config_defaults = {"sliding_window": 4096}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Without `layer_types` there is a pattern: letters, of which L slides, or how often a layer is full."""
        values = {**cls.config_defaults, **raw}
        pattern, layers = values.get("sliding_window_pattern", 4), range(num_layers(values))
        if values.get("layer_types") is None and values.get("sliding_window") is not None:
            if isinstance(pattern, str) and pattern:
                kinds = [SLIDING if pattern[i % len(pattern)] == "L" else FULL for i in layers]
            else:
                every = positive(values, "sliding_window_pattern", 4)
                kinds = [SLIDING if (i + 1) % every else FULL for i in layers]
            values["layer_types"] = kinds
        return super().read_config(values)
