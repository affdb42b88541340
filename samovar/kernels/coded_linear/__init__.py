"""The product with a weight of four bits: activations stay as they are, the weight is decoded on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.coded_weights import KINDS, decode, pack_codes, pack_scale, pack_small_scale, small_scale
from samovar.kernels.op import op


@op(prefer=("triton", "triton_fixed"), plain_is_best=("cpu",))
def coded_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    row_scale: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [tokens, in] times a packed weight transposed, plus bias [out] -> [tokens, out].

    codes int32 [row bricks, input bricks, 128] and scale int32 [row bricks, input bricks, 16 or 32] as `coded_weights`
    packs them for `kind`; row_scale [out].
    """
    weight = decode(codes, scale, kind, len(row_scale), x.shape[1], row_scale)
    return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


def random_weight(rows: int, inputs: int, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
    """(codes, scale, row_scale, kind) of a made-up weight whose products are about as large as its inputs."""
    made = KINDS[kind]
    codes = torch.randint(0, len(made.values), (rows, inputs), dtype=torch.uint8)
    if made.code == "e4m3":
        codes = torch.where(codes & 127 == 127, 0, codes).to(torch.uint8)  # no number
    groups = -(-inputs // made.group)
    scales = torch.rand(rows, groups) + 0.5
    row_scale = (torch.rand(rows) + 0.5) / (4 * inputs**0.5)
    if made.has_small_scale:
        packed = pack_small_scale(small_scale(scales.to(torch.float8_e4m3fn)))
    else:
        zero = torch.randint(0, 17, scales.shape) if made.has_zero else None
        packed = pack_scale(scales * 2.0 ** (made.shift - 1), kind, zero)
        row_scale = row_scale * 2 / {"int8": 16, "e4m3": 32, "nf4": 0.125, "fp4": 0.125}.get(made.code, 1)
    return pack_codes(codes, kind), packed, row_scale, kind


@coded_linear.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    sizes = (
        (1, 128, 40),
        (0, 64, 32),
        (5, 96, 24),
        (70, 192, 72),
        (3, 64, 16),
        (17, 128, 24),
        (2, 128, 48),
        (9, 64, 16),
        (1, 160, 32),
        (4, 96, 16),
    )
    for (tokens, inputs, rows), kind in zip(sizes, KINDS, strict=True):
        x = torch.randn(tokens, inputs)
        yield x, *random_weight(rows, inputs, kind), torch.randn(rows) if tokens > 1 else None


coded_linear.tolerance[torch.float32] = (1e-5, 1e-5)
coded_linear.tolerance[torch.bfloat16] = (3e-2, 1.6e-2)
coded_linear.tolerance[torch.float16] = (3e-2, 1.6e-2)  # the weight is decoded to bfloat16
