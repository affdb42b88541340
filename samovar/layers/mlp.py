"""The gated feed-forward network."""

from __future__ import annotations

import torch

from samovar.errors import CheckpointError
from samovar.kernels.gelu_mul import gelu_mul
from samovar.kernels.op import Op
from samovar.kernels.silu_mul import silu_mul
from samovar.layers.layer import Layer, Placement
from samovar.layers.linear import ColumnLinear, RowLinear

ACTIVATIONS: dict[str, Op[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_mul,
    "swish": silu_mul,
    "gelu_pytorch_tanh": gelu_mul,
}
"""Names of config.json -> the gated op."""


class GatedMLP(Layer):
    """down(activation(gate(x)) * up(x)). `stored_fused`: the checkpoint has one gate_up_proj tensor."""

    def __init__(
        self, dim: int, hidden: int, activation: str = "silu", *, bias: bool = False, stored_fused: bool = False
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise CheckpointError(
                f"the activation {activation!r} (hidden_act in config.json) is not supported; "
                f"there are {', '.join(sorted(ACTIVATIONS))}"
            )
        self.activation = ACTIVATIONS[activation]
        parts = {"gate_proj": hidden, "up_proj": hidden}
        self.gate_up_proj = ColumnLinear(dim, parts, bias=bias, stored_fused=stored_fused)
        self.down_proj = RowLinear(hidden, dim, bias=bias)

    def bind(self, place: Placement) -> None:
        """Choose the activation's kernel; the linears bind themselves."""
        self.gated = place.kernels.use(self.activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, dim] -> [tokens, dim]."""
        y: torch.Tensor = self.down_proj(self.gated(self.gate_up_proj(x)))
        return y
