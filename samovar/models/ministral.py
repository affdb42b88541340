"""Ministral, Ministral 3, and the text part of Mistral 3. Read beside transformers/models/ministral and ministral3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from samovar.layers import ForwardBatch, PositionScale
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.decoder import EYES, TEXT_ONLY, DecoderLM
from samovar.models.fields import num_layers, section, text_fields
from samovar.models.llama import LlamaAttention, LlamaBlock

LONG_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""What a Ministral 3 without rope parameters means."""


class MinistralForCausalLM(DecoderLM):
    """Ministral: Llama whose layers slide as `layer_types` says, all of them if it says nothing."""

    block = LlamaBlock
    config_defaults = {"sliding_window": 4096}

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """See the class."""
        kinds = raw.get("layer_types") or [SLIDING] * num_layers(raw)
        return super().read_config({**raw, "layer_types": kinds})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ministral3Config(DecoderConfig):
    """`llama_4_scaling_beta`: how much queries grow with every `scaling_length` tokens."""

    llama_4_scaling_beta: float | None = None
    scaling_length: int | None = None


class Ministral3Attention(LlamaAttention):
    """Llama's attention; queries grow with their position, if the config asks."""

    def __init__(self, c: Ministral3Config, layer: int) -> None:
        super().__init__(c, layer)
        strength, length = c.llama_4_scaling_beta, c.scaling_length
        self.growth = PositionScale(strength, length) if strength is not None and length is not None else None

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        q, k = self.rope(q, k, batch)
        if self.growth is not None:
            q = self.growth(q, batch)
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class Ministral3Block(LlamaBlock):
    """Pre-norm attention and MLP."""

    attention = Ministral3Attention


class Ministral3ForCausalLM(DecoderLM):
    """Ministral 3."""

    block = Ministral3Block
    config_class = Ministral3Config

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers alike; the growth of queries stands among the rope parameters."""
        values = {**cls.config_defaults, **raw}
        if not (values.get("rope_parameters") or values.get("rope_scaling")) and cls.is_long_without_rope(values):
            values["rope_parameters"] = LONG_ROPE
        rope = section(values, "rope_parameters") or section(values, "rope_scaling")
        if rope.get("llama_4_scaling_beta") is not None:
            values["llama_4_scaling_beta"] = rope["llama_4_scaling_beta"]
            values["scaling_length"] = rope.get("original_max_position_embeddings")
        kind = FULL if values.get("sliding_window") is None else SLIDING
        return super().read_config({**values, "layer_types": [kind] * num_layers(values)})

    @classmethod
    def is_long_without_rope(cls, values: Mapping[str, Any]) -> bool:
        """Whether a file without rope parameters means `LONG_ROPE`."""
        return True


class Mistral3ForConditionalGeneration(Ministral3ForCausalLM):
    """Mistral Small 3.1 and later, Magistral, Devstral, Ministral 3 with eyes: the text model; images are not read."""

    config_defaults: ClassVar[dict[str, Any]] = {"head_dim": 128}
    renames = {"model": "language_model.model", "lm_head": "language_model.lm_head"}
    other_renames = ({"model": "model.language_model"},)
    ignore_beginnings = EYES
    notes = TEXT_ONLY

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """The text model's fields stand in an object of their own."""
        return super().read_config(text_fields(raw))

    @classmethod
    def is_long_without_rope(cls, values: Mapping[str, Any]) -> bool:
        """The older text model has a theta and nothing else."""
        return values.get("rope_theta") is None
