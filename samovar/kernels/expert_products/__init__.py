"""The experts of a mixture: every token through the gated networks it was routed to, and their weighted sum."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch.nn.functional import gelu, linear, relu, silu

from samovar.kernels.op import op

Gate = Literal["silu", "gelu", "clamped", "relu2"]

UNGATED = ("relu2",)
"""Activations of experts that have no gate: their `gate_up` is up alone."""

CLAMPED_ALPHA = 1.702
"""What "clamped" multiplies a gate by inside its sigmoid."""


def gated(gate: torch.Tensor, up: torch.Tensor, activation: Gate, limit: float = 0.0) -> torch.Tensor:
    """activation(gate) * up. gelu is its tanh approximation. "clamped", gpt-oss's: with gates of at most `limit` and
    ups of at most `limit` in size, gate * sigmoid(1.702 gate) * (up + 1)."""
    if activation == "clamped":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        return gate * torch.sigmoid(CLAMPED_ALPHA * gate) * (up + 1)
    return (silu(gate) if activation == "silu" else gelu(gate, approximate="tanh")) * up


def halves(gate_up: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """gate and up out of the last axis: one after the other, or in turns."""
    if interleaved:
        return gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate_up.chunk(2, dim=-1)
    return gate, up


def activated(h: torch.Tensor, activation: Gate, interleaved: bool = False, limit: float = 0.0) -> torch.Tensor:
    """What `gate_up` gave [..., 2 * inner], or of the ungated [..., inner] -> [..., inner]. relu2 is relu(up)^2."""
    return relu(h).square() if activation in UNGATED else gated(*halves(h, interleaved), activation, limit)


@op(prefer=("triton", "triton_fixed", "torch_sorted"))
def expert_products(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    limit: float = 0.0,
    first: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The sum over k of weights[t, k] * expert ids[t, k] of x[t] -> [tokens, hidden].

    x [tokens, hidden]; ids int32 [tokens, k], all different in a row; weights [tokens, k], float32 as a rule. Of all
    experts the ones from `first` on are here, as gate_up [experts, 2 * inner, hidden] (gate rows then up rows, or
    `interleaved` in turns) and down [experts, hidden, inner]; those elsewhere add nothing. Biases are [experts, 2 * inner]
    and [experts, hidden]. For `activation` and `limit` see `gated` and `activated`; without a gate there are inner rows, not
    2 * inner. The sum is in float32, in the order of k, `residual` [tokens, hidden] last.
    """
    total = torch.zeros(x.shape, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for slot in range(ids.shape[1]):
        for expert in range(len(gate_up)):
            rows = (ids[:, slot] == expert + first).nonzero()[:, 0]
            if len(rows):
                h = linear(x[rows], gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
                h = activated(h, activation, interleaved, limit)
                y = linear(h, down[expert], None if down_bias is None else down_bias[expert])
                total[rows] += weights[rows, slot, None].to(total.dtype) * y.to(total.dtype)
    return (total if residual is None else total + residual).to(x.dtype)


@expert_products.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, k, experts, inner, hidden in (
        (1, 2, 4, 32, 64),
        (5, 3, 4, 24, 48),
        (34, 2, 3, 40, 32),
        (0, 2, 4, 8, 16),
    ):
        x, ids = torch.randn(tokens, hidden), torch.rand(tokens, experts).argsort(-1)[:, :k].int()
        routing = torch.rand(tokens, k) / k, torch.randn(experts, 2 * inner, hidden) / hidden**0.5
        down = torch.randn(experts, hidden, inner) / inner**0.5
        yield x, ids, *routing, down, "silu"
        biases = torch.randn(experts, 2 * inner), torch.randn(experts, hidden)
        yield x, ids, *routing, down, "clamped", *biases, True, 1.5, 0, torch.randn(tokens, hidden)
        yield x, ids, *routing, down, "gelu", None, None, False, 0.0, 1
        weights, gate_up = routing
        yield x, ids, weights, gate_up[:, :inner].contiguous(), down, "relu2", biases[0][:, :inner].contiguous()


expert_products.tolerance[torch.float32] = (1e-5, 1e-5)
expert_products.tolerance[torch.bfloat16] = (6e-2, 2e-2)
expert_products.tolerance[torch.float16] = (1e-2, 5e-3)
