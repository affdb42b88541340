"""The gated activations in Triton: gate and up are read once, their product is written once."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.silu_mul import silu_mul
from samovar.kernels.triton_launch import cdiv, launch, next_power_of_2


class GateTile(NamedTuple):
    """What one program makes: `columns` (a power of two) results of one token."""

    columns: int
    warps: int


def gate_tile(hidden: int) -> GateTile:
    """The tile for `hidden` results a token: 8 for each thread, one access of 16 bytes per 16-bit operand."""
    return GateTile(1024, 4) if hidden >= 1024 else GateTile(max(32, next_power_of_2(hidden)), 1)


@triton.jit
def activated(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """silu(x), or gelu(x) in its tanh approximation, of float32 x.

    (1 + tanh(u)) / 2 = sigmoid(2u), which also loses no digits where tanh is near -1.
    """
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    else:
        return x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))


@triton.jit
def gated_kernel(
    gate_up: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    HIDDEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out[token] = activation(gate) * up for COLUMNS columns; a token's tiles are neighbours in the grid."""
    TILES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    token = (tl.program_id(0) // TILES).to(tl.int64)
    column = tl.program_id(0) % TILES * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < HIDDEN
    await_previous(OVERLAP)
    gate = tl.load(gate_up + token * row_stride + column, mask).to(tl.float32)
    up = tl.load(gate_up + token * row_stride + HIDDEN + column, mask).to(tl.float32)
    start_next(OVERLAP)
    tl.store(out + token * HIDDEN + column, (activated(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask)


def gated(gate_up: torch.Tensor, activation: str, tile: GateTile | None = None) -> torch.Tensor:
    """activation(gate) * up for gate_up [tokens, 2 * hidden] -> [tokens, hidden]; `activation` is "silu" or "gelu"."""
    tokens, hidden = gate_up.shape[0], gate_up.shape[1] // 2
    gate_up = gate_up if gate_up.stride(1) == 1 else gate_up.contiguous()
    out = gate_up.new_empty(tokens, hidden)
    columns, warps = tile or gate_tile(hidden)
    launch(
        gated_kernel, (tokens * cdiv(hidden, columns),), gate_up, out, gate_up.stride(0),
        HIDDEN=hidden, ACTIVATION=activation, COLUMNS=columns, num_warps=warps, **launch_options(),
    )  # fmt: skip
    return out


@silu_mul.impl("triton", devices=("cuda",))
def silu_mul_triton(gate_up: torch.Tensor) -> torch.Tensor:
    """One kernel, rounded once; rows of gate_up may lie apart."""
    return gated(gate_up, "silu")
