"""The product of rounded activations with a weight of FP8 or int8 (W8A8): small numbers are multiplied, then scaled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op
from samovar.kernels.quantize_rows import Number, quantize_rows

BLOCK = 128
"""Rows and inputs of a block that has one scale, and inputs of a group of activations that goes with it."""


def number_of(weight: torch.Tensor) -> Number:
    """What the bytes of a weight are: int8, or e4m3 in uint8."""
    return "int8" if weight.dtype is torch.int8 else "fp8"


def dequantized(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weight codes [out, in] times their scales, [out] or [blocks of out, blocks of in] -> float32."""
    values = codes.float() if codes.dtype is torch.int8 else codes.view(torch.float8_e4m3fn).float()
    if scale.dim() == 1:
        return values * scale.float()[:, None]
    spread = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return values * spread[: codes.shape[0], : codes.shape[1]]


def rounded_inputs(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, input_scale: torch.Tensor | None
) -> torch.Tensor:
    """x as the product sees it, float32: rounded by row, or by groups where the weight has blocks."""
    group = -1 if scale.dim() == 1 else BLOCK
    codes, scales = quantize_rows(x, number_of(weight), group, input_scale)
    values = codes.float() if codes.dtype is torch.int8 else codes.view(torch.float8_e4m3fn).float()
    return values * (scales if group == -1 else scales.repeat_interleave(group, 1))


@op(prefer=("triton", "triton_fixed", "torch_wide"), plain_is_best=("cpu",))
def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    input_scale: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`quantize_rows` of x [tokens, in] times weight [out, in] transposed, plus bias [out] -> [tokens, out] in x's dtype.

    weight is int8, or uint8 with the bits of e4m3, and x is rounded to the same. scale is [out], with activations
    rounded by the row, or by `input_scale`, one number; or [out / 128, in / 128], rounded up, with activations rounded by
    groups of 128 inputs, which must divide them.
    """
    y = rounded_inputs(x, weight, scale, input_scale) @ dequantized(weight, scale).t()
    return (y if bias is None else y + bias.float()).to(x.dtype)


def weight_of(rows: int, inputs: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(weight, scale) for examples; `kind` is "fp8", "int8" or "blocks"."""
    weight = torch.randn(rows, inputs) / inputs**0.5
    if kind != "blocks":
        codes, scale = quantize_rows(weight, "int8" if kind == "int8" else "fp8")
        return codes, scale.squeeze(1)
    codes, _ = quantize_rows(weight, "fp8", -1, torch.tensor(0.01))
    return codes, 0.01 + torch.rand(-(-rows // BLOCK), -(-inputs // BLOCK)) / 100


@scaled_linear.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    yield torch.randn(1, 128), *weight_of(40, 128, "fp8")
    yield torch.randn(1, 384), *weight_of(136, 384, "blocks"), None, torch.randn(136)
    yield torch.randn(1, 96), *weight_of(48, 96, "int8"), torch.tensor([0.02])
    yield torch.randn(5, 256), *weight_of(136, 256, "blocks"), None, torch.randn(136)
    yield torch.randn(3, 96), *weight_of(48, 96, "fp8"), torch.tensor([0.008]), torch.randn(48)
    yield torch.randn(70, 128), *weight_of(32, 128, "int8")
    yield torch.randn(0, 128), *weight_of(32, 128, "fp8")


# What is left after equal small numbers: float32 sums in another order, and one rounding of the result.
scaled_linear.tolerance[torch.float32] = (2e-5, 1e-5)
scaled_linear.tolerance[torch.bfloat16] = (2e-2, 1.6e-2)
scaled_linear.tolerance[torch.float16] = (4e-3, 4e-3)
