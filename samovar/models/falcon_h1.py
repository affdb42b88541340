"""Falcon-H1: attention and Mamba2 in every layer, and factors of its training (maximal update, Yang et al., 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from samovar.errors import CheckpointError
from samovar.layers import AddRMSNorm, ColumnLinear, ForwardBatch, RowLinear
from samovar.layers.state_space import GatedRMSNorm, StateSpaceSizes
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.hybrid import Mamba2Mixer
from samovar.models.llama import LlamaAttention
from samovar.models.state_space import BAMBA_DEFAULTS, bamba_sizes

FACTORS = dict.fromkeys(
    (
        *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
        *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
    ),
    1.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class FalconH1Config(DecoderConfig):
    """Factors of what their names say; `mlp_multipliers` are those of gate and result, `ssm_multipliers` those of gate, x,
    b, c and dt."""

    state_space: StateSpaceSizes
    mlp_multipliers: tuple[float, ...]
    ssm_multipliers: tuple[float, ...]
    embedding_multiplier: float
    lm_head_multiplier: float
    key_multiplier: float
    attention_in_multiplier: float
    attention_out_multiplier: float
    ssm_in_multiplier: float
    ssm_out_multiplier: float
    mamba_rms_norm: bool = False
    mamba_norm_before_gate: bool = True
    projectors_bias: bool = False


class FalconH1Attention(LlamaAttention):
    """Llama's attention with scaled keys."""

    def __init__(self, c: FalconH1Config, layer: int) -> None:
        super().__init__(c, layer)
        self.factor = c.key_multiplier

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        q, k, v = self.qkv_proj(x)  # each [tokens, heads, head_dim]
        q, k = self.rope(q, k * self.factor, batch)
        return self.o_proj(self.attn(q, k, v, batch))  # type: ignore[no-any-return]


class FalconH1Mixer(Mamba2Mixer):
    """Mamba2's mixer with factors; the norm may gate last, or there is none and the gate alone."""

    def __init__(self, c: FalconH1Config) -> None:
        s = c.state_space
        super().__init__(c.hidden_size, s, c.rms_norm_eps, c.ssm_multipliers[1:4])
        norm = GatedRMSNorm(s.inner, s.groups, c.rms_norm_eps, gates_last=c.mamba_norm_before_gate)
        self.norm = norm if c.mamba_rms_norm else None  # type: ignore[assignment]
        self.out_proj = RowLinear(s.inner, c.hidden_size, bias=c.projectors_bias)
        self.of_input, self.of_gate, self.of_step = c.ssm_in_multiplier, c.ssm_multipliers[0], c.ssm_multipliers[4]

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        gate, xbc, dt = torch.split(self.in_proj(x * self.of_input), self.in_proj.sizes, dim=1)
        gate, y = gate * self.of_gate, self.scan(self.conv1d(xbc, batch), dt * self.of_step, batch)
        return self.out_proj(y * silu(gate) if self.norm is None else self.norm(y, gate))  # type: ignore[no-any-return]


class FalconH1MLP(nn.Module):
    """Llama's MLP with a factor before the activation, and one of the result."""

    def __init__(self, c: FalconH1Config) -> None:
        super().__init__()
        self.gate_proj = ColumnLinear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.up_proj = ColumnLinear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias)
        self.down_proj = RowLinear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias)
        self.of_gate, self.of_result = c.mlp_multipliers

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        y: torch.Tensor = self.down_proj(silu(self.gate_proj(x) * self.of_gate) * self.up_proj(x)) * self.of_result
        return y


class FalconH1Block(nn.Module):
    """Both mixers on the same normed input, and an MLP."""

    def __init__(self, c: FalconH1Config, layer: int) -> None:
        super().__init__()
        self.mamba, self.self_attn = FalconH1Mixer(c), FalconH1Attention(c, layer)
        self.feed_forward = FalconH1MLP(c)
        self.input_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_ff_layernorm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.of_input = c.attention_in_multiplier
        self.of_attention, self.of_scan = c.attention_out_multiplier, c.ssm_out_multiplier

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        attended = self.self_attn(x * self.of_input, batch) * self.of_attention
        x, residual = self.pre_ff_layernorm(self.mamba(x, batch) * self.of_scan + attended, residual)
        return self.feed_forward(x), residual


class FalconH1ForCausalLM(DecoderLM):
    """Falcon-H1."""

    block = FalconH1Block
    config_class = FalconH1Config
    config_defaults = {**FACTORS, **BAMBA_DEFAULTS, "mamba_d_ssm": 1024}
    renames = {"model.norm": "model.final_layernorm"}
    config: FalconH1Config

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """Lists of factors have two and five entries, or are not there."""
        values = {**cls.config_defaults, **raw, "layer_types": None}
        values["state_space"] = bamba_sizes(values)
        for name, count in (("mlp_multipliers", 2), ("ssm_multipliers", 5)):
            values[name] = given = values.get(name) or (1.0,) * count
            if not isinstance(given, (list, tuple)) or len(given) != count:
                raise CheckpointError(f"config.json: {name} must be {count} numbers, got {given!r}")
        return super().read_config(values)

    def embed_scale(self, config: DecoderConfig) -> float | None:
        """See `FalconH1Config`."""
        assert isinstance(config, FalconH1Config)
        return config.embedding_multiplier

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab], scaled."""
        return super().logits(hidden) * self.config.lm_head_multiplier
