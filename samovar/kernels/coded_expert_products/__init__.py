"""The experts of a mixture with packed weights: activations stay as they are, weights are decoded on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.coded_linear import random_weight
from samovar.kernels.coded_weights import BRICK_ROWS, decode
from samovar.kernels.expert_products import Gate, expert_products
from samovar.kernels.op import op


@op(prefer=("triton", "triton_fixed"), plain_is_best=("cpu",))
def coded_expert_products(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    gate_up_row_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    down_row_scale: torch.Tensor,
    kind: str,
    activation: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    limit: float = 0.0,
    first: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`expert_products` with weights packed as `coded_weights` says for `kind`: codes [experts, row bricks, input bricks,
    128], scale words likewise, and row scales [experts, rows]. Gate rows come first, then up rows, a multiple of 16 each."""
    inner, hidden = down_inputs(gate_up_row_scale, activation), x.shape[1]
    wide_up = decoded(gate_up, gate_up_scale, gate_up_row_scale, kind, hidden).to(x.dtype)
    wide_down = decoded(down, down_scale, down_row_scale, kind, inner).to(x.dtype)
    rest = (activation, gate_up_bias, down_bias, False, limit, first, residual)
    return expert_products.reference(x, ids, weights, wide_up, wide_down, *rest)


def decoded(codes: torch.Tensor, scale: torch.Tensor, row_scale: torch.Tensor, kind: str, inputs: int) -> torch.Tensor:
    """The weights [experts, rows, inputs] of packed experts."""
    each = zip(codes, scale, row_scale, strict=True)
    return torch.stack([decode(code, words, kind, len(rows), inputs, rows) for code, words, rows in each])


def down_inputs(gate_up_row_scale: torch.Tensor, activation: Gate) -> int:
    """The width of experts, from what scales the rows of gate and up."""
    return gate_up_row_scale.shape[1] // parts_of(activation)


def parts_of(activation: Gate | None) -> int:
    """Two for gate and up, one for what has no gate."""
    return 1 if activation is None or activation == "relu2" else 2


def random_experts(experts: int, rows: int, inputs: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scale, row_scale) of made-up experts."""
    assert rows % BRICK_ROWS == 0
    codes, scale, row_scale, _ = random_weight(experts * rows, inputs, kind)
    cut = (experts, rows // BRICK_ROWS)
    return codes.view(*cut, *codes.shape[1:]), scale.view(*cut, *scale.shape[1:]), row_scale.view(experts, rows)


@coded_expert_products.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    sizes = ((1, 2, 4, 32, 64), (5, 3, 4, 16, 96), (34, 2, 3, 48, 32), (0, 2, 4, 16, 32))
    for number, kind in enumerate(("e2m1_16", "e2m1_32", "int4_32_zero", "e4m3_16")):
        tokens, k, experts, inner, hidden = sizes[number]
        x, ids = torch.randn(tokens, hidden), torch.rand(tokens, experts).argsort(-1)[:, :k].int()
        packed = *random_experts(experts, 2 * inner, hidden, kind), *random_experts(experts, hidden, inner, kind)
        given = (x, ids, torch.rand(tokens, k) / k, *packed, kind)
        if number % 2:
            yield *given, "silu"
        else:
            biases = torch.randn(experts, 2 * inner), torch.randn(experts, hidden)
            yield *given, "clamped", *biases, 1.5, 1, torch.randn(tokens, hidden)


coded_expert_products.tolerance[torch.float32] = (1e-5, 1e-5)
coded_expert_products.tolerance[torch.bfloat16] = (1.2e-1, 4e-2)
coded_expert_products.tolerance[torch.float16] = (1.2e-1, 4e-2)  # the weight is decoded to bfloat16
