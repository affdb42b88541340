"""Gemma 3: the text model, alone or beside a vision tower. Read beside transformers/models/gemma3: same names, same order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from samovar.config.text_defaults import TEXT_DEFAULTS
from samovar.layers import ForwardBatch, RMSNorm
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import EYES, TEXT_ONLY
from samovar.models.fields import num_layers, positive, section, text_fields
from samovar.models.gemma2 import Gemma2Attention, Gemma2Block, Gemma2ForCausalLM


class Gemma3Attention(Gemma2Attention):
    """Gemma 2's attention; each head of q and k is normed before rope."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps, offset=True)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps, offset=True)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        q, k = self.rope(self.q_norm(q), self.k_norm(k), batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class Gemma3Block(Gemma2Block):
    """Attention and MLP, each normed before and after."""

    attention = Gemma3Attention


class Gemma3ForCausalLM(Gemma2ForCausalLM):
    """Gemma 3, text only: five sliding layers, then a full one, each kind with a rope of its own."""

    block = Gemma3Block
    config_defaults = {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Older files give a pattern length and two thetas instead of `layer_types` and `rope_parameters`."""
        every, by_kind = positive(raw, "sliding_window_pattern", 6), section(raw, "rope_parameters")
        kinds = raw.get("layer_types") or [SLIDING if (i + 1) % every else FULL for i in range(num_layers(raw))]
        local = {"rope_theta": raw.get("rope_local_base_freq", 10_000.0), **section(by_kind, SLIDING)}
        wide = {
            "rope_theta": raw.get("rope_theta", 1_000_000.0),
            **section(raw, "rope_scaling"),
            **section(by_kind, FULL),
        }
        return super().read_config({**raw, "layer_types": kinds, "rope_parameters": {SLIDING: local, FULL: wide}})


class Gemma3ForConditionalGeneration(Gemma3ForCausalLM):
    """Gemma 3 from 4B on: the text model; images are not read."""

    renames = {"model": "language_model.model", "lm_head": "language_model.lm_head"}
    other_renames = ({"model": "model.language_model"},)
    ignore_beginnings = EYES
    notes = TEXT_ONLY

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """The text model's fields stand in an object of their own, without those that equal its defaults."""
        return super().read_config({**TEXT_DEFAULTS["Gemma3ForConditionalGeneration"], **text_fields(raw)})
