"""Activations rounded to FP8 (e4m3) or int8, each row or group of a row by its own largest number."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import torch

from samovar.kernels.op import op

Number = Literal["fp8", "int8"]

LARGEST: dict[Number, float] = {"fp8": 448.0, "int8": 127.0}
"""What the largest number of a row becomes."""

LEAST = 2.0**-100
"""Rows of nothing larger count as zeros, which have the scale 1: quotients of such small numbers lose digits."""


@op(prefer=("triton",), plain_is_best=("cpu",))
def quantize_rows(
    x: torch.Tensor, number: Number, group: int = -1, scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, in] -> (codes [tokens, in], float32 scales [tokens, groups]): x is about codes times scales.

    Codes are int8, or uint8 with the bits of e4m3; both round to the nearest, ties to the even code, and saturate. A
    scale stands for `group` inputs, or with -1 for the row. `scale`, one number, is used instead of dynamic ones.
    """
    size = x.shape[1] if group == -1 else group
    values = x.float().view(len(x), x.shape[1] // size, size)
    if scale is None:
        most = values.abs().amax(-1, keepdim=True)
        # By a tensor: on GPUs torch multiplies by the reciprocal of a plain number, which rounds twice.
        scales = torch.where(most > LEAST, most / torch.full_like(most, LARGEST[number]), 1.0)
    else:
        scales = scale.float().expand(*values.shape[:2], 1)
    small = (values / scales).view(x.shape)
    if number == "fp8":
        codes = small.clamp(-LARGEST["fp8"], LARGEST["fp8"]).to(torch.float8_e4m3fn).view(torch.uint8)
    else:
        codes = small.round().clamp(-LARGEST["int8"] - 1, LARGEST["int8"]).to(torch.int8)
    return codes, scales.squeeze(-1).contiguous()


@quantize_rows.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for number in ("fp8", "int8"):
        yield torch.randn(3, 64), number
        yield torch.randn(2, 384), number, 128
        yield torch.randn(5, 96), number, -1, torch.tensor(0.004)
    yield torch.zeros(2, 40), "fp8"
    yield torch.randn(0, 64), "int8"


# Codes and scales are exact: every step is a correctly rounded operation.
quantize_rows.tolerance[torch.float32] = (0.0, 0.0)
quantize_rows.tolerance[torch.bfloat16] = (0.0, 0.0)
quantize_rows.tolerance[torch.float16] = (0.0, 0.0)
