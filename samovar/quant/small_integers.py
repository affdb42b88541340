"""What formats of integers hold, as integers of a byte and float16 scales for blocks of 32 weights."""

from __future__ import annotations

from itertools import accumulate, pairwise

import torch

from samovar.quant.grouped import Grouped
from samovar.quant.held import Integers, by_rows
from samovar.quant.mxfp4 import MXFP4
from samovar.quant.numbers.ggml_blocks import BLOCK


def integers(method: Grouped, weights: dict[str, torch.Tensor], num_threads: int) -> list[Integers] | None:
    """What `method` has as `weights`, part by part; None where a scale is beyond float16."""
    ends = [0, *accumulate(method.part_rows)]
    parts = [_integers(method, weights, part, rows, num_threads) for part, rows in enumerate(pairwise(ends))]
    return parts if all(bool(scale.isfinite().all()) for _, scale in parts) else None


def _integers(
    method: Grouped, weights: dict[str, torch.Tensor], part: int, rows: tuple[int, int], num_threads: int
) -> Integers:
    unit, width, blocks = 0.5 if isinstance(method, MXFP4) else 1.0, method.num_inputs, method.num_inputs // BLOCK
    first, end = rows
    levels = torch.empty(end - first, width, dtype=torch.int8)
    scale = torch.empty(end - first, blocks, dtype=torch.float16)

    def fill(some: slice) -> None:
        here, count = first + some.start, some.stop - some.start
        values = method.numbers(weights, here, count) / unit
        if "zero" in weights:
            values -= spread(weights["zero"][here : here + count].float(), width)
        levels[some] = values.to(torch.int8)
        scale[some] = spread(method.scales(weights, here, count, part) * unit, blocks).half()

    by_rows(fill, end - first, width, num_threads)
    return levels, scale


def spread(groups: torch.Tensor, width: int) -> torch.Tensor:
    """[rows, groups] -> [rows, width], each group's number as often as it takes."""
    return groups.repeat_interleave(width // groups.shape[1], 1)
