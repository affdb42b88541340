"""LFM2: short convolutions and some attention. Read beside transformers/models/lfm2/modeling_lfm2.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.layers import AddRMSNorm, ColumnLinear, ForwardBatch, GatedMLP, RowLinear
from samovar.layers.short_conv import Channels, ShortConv
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import integer, num_layers, positive
from samovar.models.hybrid import ATTENTION, attention_at, with_mixers
from samovar.models.qwen3 import Qwen3Attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(DecoderConfig):
    """`conv_width`: tokens that a convolution sees."""

    mixers: tuple[str, ...]
    conv_width: int
    conv_bias: bool = False


class Lfm2ShortConv(nn.Module):
    """A gated convolution over the last tokens."""

    def __init__(self, c: Any) -> None:
        super().__init__()
        parts = {"b": c.hidden_size, "c": c.hidden_size, "x": c.hidden_size}
        self.in_proj = ColumnLinear(c.hidden_size, parts, bias=c.conv_bias, stored_fused=True)
        self.conv = ShortConv((Channels(c.hidden_size),), c.conv_width, bias=c.conv_bias)
        self.out_proj = RowLinear(c.hidden_size, c.hidden_size, bias=c.conv_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        before, after, x = torch.chunk(self.in_proj(x), 3, dim=1)
        y: torch.Tensor = self.out_proj(after * self.conv(before * x, batch))
        return y


class Lfm2Block(nn.Module):
    """Attention or a convolution, and an MLP."""

    def __init__(self, c: Any, layer: int) -> None:
        super().__init__()
        self.is_attention = c.mixers[layer] == ATTENTION
        if self.is_attention:
            self.self_attn = Qwen3Attention(c, layer)
        else:
            self.conv = Lfm2ShortConv(c)
        self.feed_forward: nn.Module = GatedMLP(c.hidden_size, c.intermediate_size)
        self.operator_norm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.ffn_norm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.operator_norm(x, residual)
        y = self.self_attn(x, batch) if self.is_attention else self.conv(x, batch)
        x, residual = self.ffn_norm(y, residual)
        return self.feed_forward(x), residual


class Lfm2ForCausalLM(DecoderLM):
    """LFM2."""

    block: ClassVar[type[nn.Module]] = Lfm2Block
    config_class: ClassVar[type[DecoderConfig]] = Lfm2Config
    config_defaults: ClassVar[dict[str, Any]] = {
        "tie_word_embeddings": True,
        "norm_eps": 1e-5,
        "conv_L_cache": 3,
        "rope_theta": 1_000_000.0,
    }
    renames: ClassVar[dict[str, str]] = {
        "model.norm": "model.embedding_norm",
        "self_attn.q_norm": "self_attn.q_layernorm",
        "self_attn.k_norm": "self_attn.k_layernorm",
        "self_attn.o_proj": "self_attn.out_proj",
        "feed_forward.gate_proj": "feed_forward.w1",
        "feed_forward.up_proj": "feed_forward.w3",
        "feed_forward.down_proj": "feed_forward.w2",
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Layers are convolutions but where `layer_types` or `full_attn_idxs` say otherwise."""
        values = {**cls.config_defaults, **raw}
        values |= {"rms_norm_eps": values["norm_eps"], "conv_width": values["conv_L_cache"]}
        values["tie_word_embeddings"] = values.get("tie_embedding", values["tie_word_embeddings"])
        values["intermediate_size"] = cls.inner_size(values)
        attended = values.get("full_attn_idxs") or range(num_layers(values))
        kinds = values.get("layer_types") or attention_at(values, attended)
        return super().read_config(with_mixers(values, kinds))

    @classmethod
    def inner_size(cls, values: Mapping[str, Any]) -> int:
        """Width of the MLP: files may give what it is computed from."""
        wide = positive(values, "block_ff_dim", 0) or integer(values, "intermediate_size")
        if not values.get("block_auto_adjust_ff_dim", True):
            return wide
        factor, each = values.get("block_ffn_dim_multiplier", 1.0), positive(values, "block_multiple_of", 256)
        wide = 2 * wide // 3
        return wide if factor is None else -(-int(factor * wide) // each) * each
