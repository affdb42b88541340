"""How far off a product on tensor cores may be: bounds from the arithmetic."""

from __future__ import annotations

from typing import NamedTuple

import torch

SUM_BITS = 2.0**-23
"""What one addition of a tensor core loses at most, of a float32 sum."""
FP8_SUM_BITS = 2.0**-13
"""The same for products of FP8 on Hopper, which keeps 13 bits behind the largest (DeepSeek-V3, 2024, section 3.5.2)."""
AT_ONCE, FP8_AT_ONCE = 8, 32
"""Products that a tensor core adds at once, at least; a few sums more join the shares of several programs."""
VARIED_INPUTS = 0.1
"""A last digit of a norm moves one in fifteen inputs to the next number of FP8, up to a sixteenth away: an error of
0.06 / 15 ** 0.5 of the sum's deviation, six times that at worst."""
WEIGHT_ROUNDING = 2.0**-9
"""Weights that are decoded for a matrix library are rounded to 8 bits; of few different numbers all may be rounded alike."""
SPARE = 2.0**-7
"""Of a sum's deviation, for devices that round towards zero."""


class Expected(NamedTuple):
    """What a product should be and how far off it may be, float32 [tokens, rows]."""

    values: torch.Tensor
    errors: torch.Tensor


def product(
    x: torch.Tensor, weight: torch.Tensor, of_result: torch.dtype, *, is_fp8: bool = False, inputs_vary: bool = False
) -> Expected:
    """x [tokens, in] times weight [rows, in] transposed, both float32, and its error when it is computed on tensor cores
    and rounded to `of_result`; `inputs_vary`: of x, some are rounded to the next number."""
    values = x @ weight.t()
    deviation = ((x * x) @ (weight * weight).t()).sqrt_()
    if is_fp8:
        # Of sums on their way, which are seldom four times as large as such a sum is wide.
        lost = FP8_SUM_BITS * (weight.shape[1] / FP8_AT_ONCE + 32) * 4 * deviation
    else:
        most = x.norm(dim=1)[:, None] * weight.norm(dim=1)[None, :]
        lost = SUM_BITS * (weight.shape[1] / AT_ONCE + 32) * most
    eps, varied = torch.finfo(of_result).eps, VARIED_INPUTS if inputs_vary else 0.0
    # Not every device rounds a result to the nearest: up to a whole step is lost, as it is of sums that are joined.
    rounded = WEIGHT_ROUNDING * (x.abs() @ weight.abs().t())
    return Expected(values, 2 * eps * values.abs() + lost + rounded + (SPARE + varied) * deviation + 1e-30)


def gated(gate: Expected, up: Expected, activation: str, of_result: torch.dtype) -> Expected:
    """activation(gate) * up. No activation is steeper than 1.2."""
    if activation == "silu":
        opened = torch.nn.functional.silu(gate.values)
    else:
        opened = torch.nn.functional.gelu(gate.values, approximate="tanh")
    # A product that is not joined rounds gate, up and the opened gate on the way.
    eps = torch.finfo(of_result).eps
    steep = 1.2 * (gate.errors + eps * gate.values.abs()) + eps * opened.abs()
    errors = steep * (up.values.abs() + up.errors) + opened.abs() * up.errors
    values = opened * up.values
    return Expected(values, errors + eps * values.abs() + 1e-6)
