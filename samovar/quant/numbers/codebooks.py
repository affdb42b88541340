"""Codes that stand for places in a table: NF4 and FP4 of bitsandbytes, and its eight-bit map for scales."""

from __future__ import annotations

from itertools import pairwise

import torch

from samovar.quant.numbers.small_floats import table

NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of the normal distribution, scaled to one (Dettmers et al., QLoRA, 2023)."""
_FP4_HALF = (0.0, 0.0625 / 12, 8 / 12, 1.0, 4 / 12, 6 / 12, 2 / 12, 3 / 12)
FP4_VALUES = (*_FP4_HALF, *(-value for value in _FP4_HALF))
"""The four-bit float of bitsandbytes, scaled to one. It is not E2M1."""

VALUES = {"nf4": NF4_VALUES, "fp4": FP4_VALUES}


def decode(codes: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Codes, one a byte -> float32 from a table."""
    return table(values, codes.device)[codes.int()]


def encode(x: torch.Tensor, values: tuple[float, ...]) -> torch.Tensor:
    """Numbers from -1 to 1 -> the code of the nearest value, one a byte; ties go to the smaller value, NaN to zero.

    What lies outside gets the code of the nearest end.
    """
    codes = {value: code for code, value in reversed(list(enumerate(values)))}  # the smallest code of each value
    order = [codes[value] for value in sorted(codes)]
    ascending = [values[code] for code in order]
    middles = tuple((low + high) / 2 for low, high in pairwise(ascending))
    places = torch.bucketize(torch.nan_to_num(x.float(), 0.0), table(middles, x.device))
    return torch.tensor(order, dtype=torch.uint8, device=x.device)[places]
