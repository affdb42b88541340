"""Mamba2, without attention. Read beside transformers/models/mamba2/modeling_mamba2.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.layers import AddRMSNorm, ForwardBatch
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import integer, num_layers
from samovar.models.hybrid import ENDLESS, HybridConfig, Mamba2Mixer, with_mixers
from samovar.models.state_space import mamba2_sizes


class Mamba2Block(nn.Module):
    """A norm and a mixer."""

    def __init__(self, c: HybridConfig, layer: int) -> None:
        super().__init__()
        self.norm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mixer = Mamba2Mixer(c.hidden_size, c.state_space, c.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.norm(x, residual)
        return self.mixer(x, batch), residual


class Mamba2ForCausalLM(DecoderLM):
    """Mamba2."""

    block: ClassVar[type[nn.Module]] = Mamba2Block
    config_class: ClassVar[type[DecoderConfig]] = HybridConfig
    config_defaults: ClassVar[dict[str, Any]] = {
        "num_heads": 128,
        "head_dim": 64,
        "state_size": 128,
        "n_groups": 8,
        "expand": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
    }
    renames: ClassVar[dict[str, str]] = {
        "model.embed_tokens": "backbone.embeddings",
        "model.layers": "backbone.layers",
        "model.norm": "backbone.norm_f",
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """There is no attention, whose fields get values that nobody reads."""
        values = {**cls.config_defaults, **raw}
        values["state_space"] = mamba2_sizes(values, "num_heads", "head_dim", "state_size")
        return super().read_config(without_attention(values))


def without_attention(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` of a model that has recurrent layers only."""
    given = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": ENDLESS}
    wide = integer(values, "expand") * integer(values, "hidden_size")
    own = {"intermediate_size": wide, "rms_norm_eps": values["layer_norm_epsilon"]}
    return with_mixers({**values, **given, **own}, ["mamba"] * num_layers(values))
