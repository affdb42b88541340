"""What families that mix attention with recurrent layers share: kinds of layers, Mamba2's mixer, a block with either."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from samovar.errors import CheckpointError
from samovar.layers import AddRMSNorm, Attention, ForwardBatch, GatedMLP, QKVLinear, RowLinear
from samovar.layers.short_conv import Channels, ShortConv
from samovar.layers.state_space import GatedRMSNorm, StateSpaceInput, StateSpaceScan, StateSpaceSizes
from samovar.models.config import DecoderConfig
from samovar.models.fields import num_layers
from samovar.models.llama import LlamaAttention
from samovar.models.mixture import MixtureConfig

ATTENTION, RECURRENT = "attention", "recurrent"
KINDS = {
    "attention": ATTENTION,
    "full_attention": ATTENTION,
    "conv": RECURRENT,
    "linear_attention": RECURRENT,
    "mamba": RECURRENT,
}
"""Names of config.json files -> the kind of a layer's mixer."""

ENDLESS = 2**20
"""A length for models that have none of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(DecoderConfig):
    """`mixers` has the kind of every layer."""

    mixers: tuple[str, ...]
    state_space: StateSpaceSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridMixtureConfig(MixtureConfig):
    """The same for families with experts."""

    mixers: tuple[str, ...]
    state_space: StateSpaceSizes


AnyHybrid = HybridConfig | HybridMixtureConfig


def with_mixers(raw: Mapping[str, Any], given: Any, kinds: Mapping[str, str] = KINDS) -> dict[str, Any]:
    """`raw` with the kind of every layer, from the list `given`, and nothing that slides."""
    count = num_layers(raw)
    if not isinstance(given, (list, tuple, str)) or len(given) != count or not all(kind in kinds for kind in given):
        raise CheckpointError(f"config.json: the kinds of layers must be {count} of {', '.join(kinds)}, got {given!r}")
    return {**raw, "mixers": [kinds[kind] for kind in given], "layer_types": None}


def attention_at(raw: Mapping[str, Any], indices: Any) -> list[str]:
    """Kinds of layers that are recurrent but at `indices`, a list that a file may have."""
    if not isinstance(indices, (list, tuple, range)):
        raise CheckpointError(f"config.json: the layers with attention must be a list, got {indices!r}")
    return ["attention" if layer in indices else "mamba" for layer in range(num_layers(raw))]


class Mamba2Mixer(nn.Module):
    """One product for all inputs, the convolution, the scan, a gated norm. `scales` multiply x, b and c."""

    def __init__(self, hidden: int, s: StateSpaceSizes, eps: float, scales: Sequence[float] = (1.0, 1.0, 1.0)) -> None:
        super().__init__()
        pieces = ((s.heads, s.head_dim), (s.groups, s.state), (s.groups, s.state))
        parts = [Channels(*piece, scale) for piece, scale in zip(pieces, scales)]
        self.in_proj = StateSpaceInput(hidden, s)
        self.conv1d = ShortConv(parts, s.conv_width, bias=s.has_conv_bias, activation="silu")
        self.scan = StateSpaceScan(s)
        self.norm = GatedRMSNorm(s.inner, s.groups, eps)
        self.out_proj = RowLinear(s.inner, hidden, bias=s.has_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        gate, xbc, dt = torch.split(self.in_proj(x), self.in_proj.sizes, dim=1)
        y: torch.Tensor = self.out_proj(self.norm(self.scan(self.conv1d(xbc, batch), dt, batch), gate))
        return y


class NoRopeAttention(nn.Module):
    """Grouped-query attention without rope: recurrent layers know where a token stands."""

    def __init__(self, c: DecoderConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = QKVLinear(c.hidden_size, heads, kv_heads, dim)
        self.attn = Attention(heads, kv_heads, dim)
        self.o_proj = RowLinear(heads * dim, c.hidden_size)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        y: torch.Tensor = self.o_proj(self.attn(q, k, v, batch))
        return y


class HybridBlock(nn.Module):
    """Pre-norm attention or a recurrent mixer, and an MLP."""

    attention: type[nn.Module] = LlamaAttention

    def __init__(self, c: Any, layer: int) -> None:
        super().__init__()
        self.is_attention = c.mixers[layer] == ATTENTION
        if self.is_attention:
            self.self_attn = self.attention(c, layer)
        else:
            self.mamba = self.recurrent(c)
        self.mlp: nn.Module = GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act, bias=c.mlp_bias)
        self.input_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)

    def recurrent(self, c: Any) -> nn.Module:
        """Mamba2's mixer, unless a family says otherwise."""
        return Mamba2Mixer(c.hidden_size, c.state_space, c.rms_norm_eps)

    def mix(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Whichever this layer has."""
        y: torch.Tensor = self.self_attn(x, batch) if self.is_attention else self.mamba(x, batch)
        return y

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.mix(x, batch), residual)
        return self.mlp(x), residual
