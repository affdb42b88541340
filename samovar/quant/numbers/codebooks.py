"""Codes that stand for places in a table: NF4 and FP4 of bitsandbytes, and its eight-bit map for scales."""

from __future__ import annotations

from itertools import pairwise

import torch

from samovar.kernels.coded_weights import FP4, NF4
from samovar.quant.numbers.small_floats import table

VALUES = {"nf4": NF4, "fp4": FP4}


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
