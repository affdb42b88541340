"""MiniCPM 3: latent attention; what is embedded, added to the stream and given to the head is scaled.

Read beside transformers/models/minicpm3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from samovar.layers import ForwardBatch
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import integer
from samovar.models.latent import LatentBlock, LatentConfig, with_latent


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPM3Config(LatentConfig):
    """`scale_emb` multiplies embeddings; `scale_depth` / sqrt(layers) what is added to the stream; hidden states are divided
    by hidden_size / `dim_model_base` before the head."""

    scale_emb: float
    scale_depth: float
    dim_model_base: float


class MiniCPM3Block(LatentBlock):
    """Llama's block; what it adds to the stream is scaled."""

    def __init__(self, c: MiniCPM3Config, layer: int) -> None:
        super().__init__(c, layer)
        self.factor = c.scale_depth / math.sqrt(c.num_hidden_layers)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x, batch) * self.factor, residual)
        return self.mlp(x) * self.factor, residual


class MiniCPM3ForCausalLM(DecoderLM):
    """MiniCPM 3."""

    block = MiniCPM3Block
    config_class = MiniCPM3Config
    config_defaults = {
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }
    config: MiniCPM3Config

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """A scale that is null changes nothing; values are as wide as a head of a model without latent attention."""
        values = {**cls.config_defaults, **raw}
        hidden, heads = integer(values, "hidden_size"), integer(values, "num_attention_heads")
        neutral = {
            "v_head_dim": hidden // heads,
            "scale_depth": math.sqrt(integer(values, "num_hidden_layers")),
            "dim_model_base": hidden,
        }
        values |= {name: value for name, value in neutral.items() if values.get(name) is None}
        return super().read_config(with_latent(values, interleaved=False))

    def embed_scale(self, config: DecoderConfig) -> float | None:
        """See `MiniCPM3Config`."""
        assert isinstance(config, MiniCPM3Config)
        return config.scale_emb

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab], scaled."""
        return super().logits(hidden) * (self.config.dim_model_base / self.config.hidden_size)
