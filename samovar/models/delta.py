"""What families with gated delta nets share: their fields of config.json, gated attention, the mixer, and a block with either."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.errors import CheckpointError
from samovar.layers import AddRMSNorm, Attention, ForwardBatch, GatedMLP, RMSNorm, Rope, RowLinear
from samovar.layers.arranged import GatedQKVLinear
from samovar.layers.gated_delta import GatedDeltaInput, GatedDeltaRule, GatedDeltaSizes, GatedHeadsNorm, SigmoidGate
from samovar.layers.short_conv import ShortConv
from samovar.models.config import DecoderConfig
from samovar.models.fields import integer, num_layers, positive
from samovar.models.hybrid import ATTENTION, with_mixers
from samovar.models.mixture import MixtureConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaConfig(DecoderConfig):
    """`mixers` has the kind of every layer; `delta` the sizes of those that are recurrent."""

    mixers: tuple[str, ...]
    delta: GatedDeltaSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaMixtureConfig(MixtureConfig):
    """The same for families with experts."""

    mixers: tuple[str, ...]
    delta: GatedDeltaSizes


DELTA_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}


def with_delta(values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with the kind of every layer, and the sizes of the recurrent ones."""
    if values.get("attn_output_gate") is False:
        raise CheckpointError("config.json: attn_output_gate is false, and this family is known with gates only")
    heads, key_heads = (integer(values, f"linear_num_{kind}_heads") for kind in ("value", "key"))
    if heads % key_heads:
        raise CheckpointError(
            f"config.json: linear_num_value_heads {heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    sizes = GatedDeltaSizes(
        key_heads=key_heads,
        heads=heads,
        key_dim=integer(values, "linear_key_head_dim"),
        value_dim=integer(values, "linear_value_head_dim"),
        conv_width=integer(values, "linear_conv_kernel_dim"),
    )
    every = positive(values, "full_attention_interval", 4)
    kinds = ["linear_attention" if (i + 1) % every else "full_attention" for i in range(num_layers(values))]
    return {**with_mixers(values, values.get("layer_types") or kinds), "delta": sizes}


class GatedAttention(nn.Module):
    """Grouped-query attention; each head of q and k is normed before rope, and the result is gated."""

    def __init__(self, c: DeltaConfig | DeltaMixtureConfig, layer: int) -> None:
        super().__init__()
        heads, kv_heads, dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.qkv_proj = GatedQKVLinear(c.hidden_size, heads, kv_heads, dim, bias=c.attention_bias)
        self.q_norm = RMSNorm(dim, c.rms_norm_eps, offset=True)
        self.k_norm = RMSNorm(dim, c.rms_norm_eps, offset=True)
        self.rope = Rope(dim, c.rope_of(layer))
        self.attn = Attention(heads, kv_heads, dim)
        self.gate = SigmoidGate()
        self.o_proj = RowLinear(heads * dim, c.hidden_size, bias=c.attention_bias)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v, gate = self.qkv_proj(x)  # each [tokens, heads, head_dim], but for the gate [tokens, heads * head_dim]
        q, k = self.rope(self.q_norm(q), self.k_norm(k), batch)
        y: torch.Tensor = self.o_proj(self.gate(self.attn(q, k, v, batch), gate))
        return y


class GatedDeltaNet(nn.Module):
    """One product for all inputs, the convolution, the rule, a gated norm."""

    def __init__(self, c: DeltaConfig | DeltaMixtureConfig, *, by_key_head: bool) -> None:
        super().__init__()
        s = c.delta
        self.in_proj = GatedDeltaInput(c.hidden_size, s, by_key_head=by_key_head)
        self.conv1d = ShortConv(s.channels, s.conv_width, activation="silu")
        self.rule = GatedDeltaRule(s)
        self.norm = GatedHeadsNorm(s.value_dim, c.rms_norm_eps)
        self.out_proj = RowLinear(s.values, c.hidden_size)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        mixed, z, b, a = self.in_proj(x)
        y: torch.Tensor = self.out_proj(self.norm(self.rule(self.conv1d(mixed, batch), b, a, batch), z))
        return y


class DeltaBlock(nn.Module):
    """Pre-norm attention or delta net, and an MLP."""

    by_key_head: ClassVar[bool] = False

    def __init__(self, c: DeltaConfig | DeltaMixtureConfig, layer: int) -> None:
        super().__init__()
        self.is_attention = c.mixers[layer] == ATTENTION
        if self.is_attention:
            self.self_attn = GatedAttention(c, layer)
        else:
            self.linear_attn = GatedDeltaNet(c, by_key_head=self.by_key_head)
        self.mlp: nn.Module = self.make_mlp(c, layer)
        self.input_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps, offset=True)
        self.post_attention_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps, offset=True)

    def make_mlp(self, c: DeltaConfig | DeltaMixtureConfig, layer: int) -> nn.Module:
        """One network for all tokens, unless a family says otherwise."""
        return GatedMLP(c.hidden_size, c.intermediate_size, c.hidden_act)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        y = self.self_attn(x, batch) if self.is_attention else self.linear_attn(x, batch)
        x, residual = self.post_attention_layernorm(y, residual)
        return self.mlp(x), residual
