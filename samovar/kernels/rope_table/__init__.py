"""The tables of the rotary embedding for one step, as the op `rope` takes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op


@op(prefer=("triton",), plain_is_best=("cpu",))
def rope_table(
    positions: torch.Tensor, per_position: torch.Tensor, magnitude: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [tokens, 1, rotary_dim] of `dtype`: cos repeats for both halves, sin is negated in the first.

    positions [tokens] int64; per_position [rotary_dim / 2] float32, radians per token; `magnitude` multiplies both.
    The angle is a float32 product, as the models were trained with, and cos and sin are those of that very number.
    """
    angle = (positions[:, None].float() * per_position)[:, None]
    cos, sin = angle.cos() * magnitude, angle.sin() * magnitude
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


@rope_table.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    for tokens, half, magnitude in ((3, 8, 1.0), (1, 64, 1.0), (37, 40, 1.25), (0, 16, 1.0)):
        per_position = 10000.0 ** -(torch.arange(half) / half)
        # Small positions, for which a float32 angle is as good as an exact one.
        yield torch.randint(0, 30, (tokens,)), per_position, magnitude, torch.float32


rope_table.tolerance[torch.float32] = (2e-6, 2e-6)
rope_table.tolerance[torch.bfloat16] = (2e-6, 2e-6)
rope_table.tolerance[torch.float16] = (2e-6, 2e-6)
