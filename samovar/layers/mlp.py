"""The feed-forward networks: gated, and plain."""

from __future__ import annotations

import torch
from torch import nn

from samovar.errors import CheckpointError
from samovar.layers.elementwise import Activation
from samovar.layers.layer import Layer, Placement
from samovar.layers.linear import ColumnLinear, RowLinear
from samovar.quant.base import GATED
from samovar.quant.base import Activation as Gate

ACTIVATIONS: dict[str, Gate] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu"}
"""Names of config.json -> the gated activation, a key of `GATED`."""


class GatedActivation(Layer):
    """activation(gate) * up. `activation` is config.json's name; an unknown one raises `CheckpointError`."""

    def __init__(self, activation: str) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise CheckpointError(
                f"the activation {activation!r} (hidden_act in config.json) is not supported; "
                f"there are {', '.join(sorted(ACTIVATIONS))}"
            )
        self.kind = ACTIVATIONS[activation]

    def bind(self, place: Placement) -> None:
        """Choose the kernel."""
        self.gated = place.kernels.use(GATED[self.kind])

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [tokens, 2 * hidden], gate then up -> [tokens, hidden]."""
        return self.gated(gate_up)


class MLP(nn.Module):
    """down(activation(up(x))): two products, nothing gated. `activation` is config.json's name, or a layer."""

    def __init__(self, dim: int, hidden: int, activation: str | Layer, *, bias: bool = False) -> None:
        super().__init__()
        self.up_proj = ColumnLinear(dim, hidden, bias=bias)
        self.act_fn = Activation(activation) if isinstance(activation, str) else activation
        self.down_proj = RowLinear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, dim] -> [tokens, dim]."""
        y: torch.Tensor = self.down_proj(self.act_fn(self.up_proj(x)))
        return y


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)). `stored_fused`: the checkpoint has one gate_up_proj tensor."""

    def __init__(
        self, dim: int, hidden: int, activation: str = "silu", *, bias: bool = False, stored_fused: bool = False
    ) -> None:
        super().__init__()
        parts = {"gate_proj": hidden, "up_proj": hidden}
        self.gate_up_proj = ColumnLinear(dim, parts, bias=bias, stored_fused=stored_fused)
        self.activation = GatedActivation(activation)
        self.down_proj = RowLinear(hidden, dim, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, dim] -> [tokens, dim]."""
        y: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return y
