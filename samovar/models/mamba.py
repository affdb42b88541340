"""Mamba and Falcon-Mamba, without attention. Read beside transformers/models/mamba and falcon_mamba."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import silu

from samovar.layers import AddRMSNorm, ColumnLinear, ForwardBatch, RMSNorm, RowLinear, UnitRMSNorm
from samovar.layers.short_conv import Channels, ShortConv
from samovar.layers.state_space import SelectiveScan
from samovar.models.config import DecoderConfig
from samovar.models.fields import integer, positive
from samovar.models.mamba2 import Mamba2ForCausalLM, without_attention


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSizes:
    """A mixer of `inner` channels with `state` numbers each, whose steps come from `rank` numbers."""

    hidden: int
    inner: int
    state: int
    rank: int
    conv_width: int
    has_conv_bias: bool = True
    has_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaConfig(DecoderConfig):
    """`mixer_rms_eps` is that of the norms of Falcon-Mamba."""

    selective: MambaSizes
    mixer_rms_eps: float = 1e-6


class MambaMixer(nn.Module):
    """Inputs and a gate, the convolution, steps and b and c made of its result, the scan."""

    def __init__(self, s: MambaSizes) -> None:
        super().__init__()
        self.in_proj = ColumnLinear(s.hidden, {"x": s.inner, "gate": s.inner}, bias=s.has_bias, stored_fused=True)
        self.conv1d = ShortConv([Channels(s.inner)], s.conv_width, bias=s.has_conv_bias, activation="silu")
        self.x_proj = RowLinear(s.inner, s.rank + 2 * s.state)
        self.dt_proj = ColumnLinear(s.rank, s.inner, bias=True)
        self.scan = SelectiveScan(s.inner, s.state)
        self.out_proj = RowLinear(s.inner, s.hidden, bias=s.has_bias)
        self.sizes = [s.rank, s.state, s.state]

    def normed(
        self, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What becomes of them before they are used: nothing."""
        return dt, b, c

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        x, gate = torch.chunk(self.in_proj(x), 2, dim=1)
        x = self.conv1d(x, batch)
        dt, b, c = torch.split(self.x_proj(x), self.sizes, dim=1)
        dt, b, c = self.normed(dt, b, c)
        y: torch.Tensor = self.scan(x, self.dt_proj(dt), b, c, batch)
        return self.out_proj(y * silu(gate))  # type: ignore[no-any-return]


class NormedMambaMixer(MambaMixer):
    """The same with a norm each of steps, b and c: with weights, as Jamba has them, or without, as Falcon-Mamba."""

    def __init__(self, s: MambaSizes, eps: float, norm: type[RMSNorm | UnitRMSNorm] = RMSNorm) -> None:
        super().__init__(s)
        self.dt_layernorm, self.b_layernorm, self.c_layernorm = (norm(size, eps) for size in self.sizes)

    def normed(
        self, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Each by itself."""
        return self.dt_layernorm(dt), self.b_layernorm(b), self.c_layernorm(c)


class MambaBlock(nn.Module):
    """A norm and a mixer."""

    def __init__(self, c: MambaConfig, layer: int) -> None:
        super().__init__()
        self.norm = AddRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mixer = self.mixer_of(c)

    def mixer_of(self, c: MambaConfig) -> MambaMixer:
        """Mamba's."""
        return MambaMixer(c.selective)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.norm(x, residual)
        return self.mixer(x, batch), residual


class MambaForCausalLM(Mamba2ForCausalLM):
    """Mamba."""

    block = MambaBlock
    config_class = MambaConfig
    config_defaults = {
        "tie_word_embeddings": True,
        "state_size": 16,
        "expand": 2,
        "conv_kernel": 4,
        "time_step_rank": "auto",
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """There is no attention, whose fields get values that nobody reads."""
        values = {**cls.config_defaults, **raw}
        hidden, rank = integer(values, "hidden_size"), values["time_step_rank"]
        values["selective"] = MambaSizes(
            hidden=hidden,
            inner=positive(values, "intermediate_size", integer(values, "expand") * hidden),
            state=integer(values, "state_size"),
            rank=-(-hidden // 16) if rank == "auto" else integer(values, "time_step_rank"),
            conv_width=integer(values, "conv_kernel"),
            has_conv_bias=bool(values["use_conv_bias"]),
            has_bias=bool(values["use_bias"]),
        )
        return cls.config_class.from_hf(without_attention(values))


class FalconMambaBlock(MambaBlock):
    """Steps, b and c are normed."""

    def mixer_of(self, c: MambaConfig) -> MambaMixer:
        """See `NormedMambaMixer`."""
        return NormedMambaMixer(c.selective, c.mixer_rms_eps, UnitRMSNorm)


class FalconMambaForCausalLM(MambaForCausalLM):
    """Falcon-Mamba."""

    block = FalconMambaBlock
