"""Rounding of activations, for formats that multiply small numbers on both sides. Plain torch: what kernels must match."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from samovar.quant.numbers.small_floats import E4M3_MAX, encode_e4m3

INT8_MAX = 127.0


@dataclass(frozen=True, slots=True)
class Inputs:
    """How activations are rounded: one scale for a tensor, for each token, or for each group of features.

    Where not `is_dynamic`, the checkpoint has the scale (and, if not `is_symmetric`, the zero point).
    """

    number: Literal["int8", "fp8"]
    strategy: Literal["tensor", "token", "group"] = "token"
    is_dynamic: bool = True
    is_symmetric: bool = True
    group_size: int = -1


def round_inputs(
    x: torch.Tensor, inputs: Inputs, scale: torch.Tensor | None = None, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """x [tokens, in] as the format sees it, in x's dtype. `scale` and `zero` (numbers) are those of a checkpoint."""
    values = x.float()
    if inputs.strategy == "group":
        values = values.view(*x.shape[:-1], x.shape[-1] // inputs.group_size, inputs.group_size)
    if scale is None:
        scale, zero = _dynamic(values, inputs)
    small = values / scale
    if inputs.number == "fp8":
        rounded = encode_e4m3(small).float()
    else:
        shift = 0.0 if zero is None else zero
        rounded = (small.round() + shift).clamp(-INT8_MAX - 1, INT8_MAX) - shift
    return (rounded * scale).view(x.shape).to(x.dtype)


def _dynamic(values: torch.Tensor, inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scale and zero point of what came; of nothing but zeros the scale is one."""
    largest = E4M3_MAX if inputs.number == "fp8" else INT8_MAX
    if inputs.is_symmetric:
        size = values.abs()
        most = _most(size, inputs)
        return torch.where(most > 0, most / largest, 1.0), None
    high, low = _most(values, inputs).clamp(min=0), -_most(-values, inputs).clamp(min=0)
    span = (high - low) / (2 * INT8_MAX + 1)
    scale = torch.where(span > 0, span, 1.0)
    return scale, (-INT8_MAX - 1 - low / scale).round()


def _most(values: torch.Tensor, inputs: Inputs) -> torch.Tensor:
    if not values.numel():
        return values.new_ones(*values.shape[:-1], 1)
    return values.amax() if inputs.strategy == "tensor" else values.amax(-1, keepdim=True)
