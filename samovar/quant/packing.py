"""Packing what a checkpoint stores for the CPU library: where it lies, if the packed form takes the same room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from samovar.native.abi import ALIGNMENT, PANEL, CMatrix
from samovar.native.matrix import Matrix, packed_bytes
from samovar.native.pages import Pages
from samovar.quant.formats import WeightFormat
from samovar.quant.specs import Dim, FeatureAxis, TensorSpec

ROWS_AT_ONCE = 64 * PANEL
"""Rows that one thread packs in a row."""


def spec_of(format: WeightFormat) -> TensorSpec:
    """How the rows of a checkpoint's tensor run along a linear's features."""
    return TensorSpec("weight", format.dtype, (Dim("out"), Dim("in", format.block_size)))


def room_for(
    format: WeightFormat,
    features: dict[FeatureAxis, int],
    part_rows: Sequence[int],
    empty: Callable[..., torch.Tensor],
    pages: Pages,
) -> torch.Tensor:
    """Room for what the checkpoint stores: [rows, cols], or uint8 [rows, blocks, bytes of a block]; from `pages` if it
    will be packed where it lies."""
    inner = (format.block_bytes,) if format.has_blocks else ()
    raw = empty(*spec_of(format).shape(features), *inner, dtype=format.dtype)
    if raw.device.type != "cpu" or not stays(format, part_rows, columns(format, raw), raw[:1].nbytes):
        return raw
    return torch.from_numpy(pages.take(raw.nbytes)).view(raw.dtype).view(raw.shape)


def columns(format: WeightFormat, raw: torch.Tensor) -> int:
    """Input features of what was loaded."""
    return raw.shape[1] * format.block_size


def stays(format: WeightFormat, part_rows: Sequence[int], cols: int, row_bytes: int) -> bool:
    """Whether the packed form takes the very room of rows of `row_bytes`, part by part."""
    for part, rows in enumerate(part_rows):
        size = packed_bytes(format.code, rows, cols)
        is_last = part == len(part_rows) - 1
        if size != rows * row_bytes or rows % PANEL or (size % ALIGNMENT and not is_last):
            return False
    return True


def pack(
    format: WeightFormat, raw: torch.Tensor, part_rows: Sequence[int], num_threads: int, pages: Pages
) -> tuple[torch.Tensor, list[CMatrix]]:
    """`raw` packed, as one tensor of bytes, and the description of each of its parts. `raw` is not valid any more."""
    cols, row_bytes = columns(format, raw), raw[:1].nbytes
    if stays(format, part_rows, cols, row_bytes):
        places, packed = [rows * row_bytes for rows in part_rows], raw.view(torch.uint8).view(-1)
    else:
        sizes = [packed_bytes(format.code, rows, cols) for rows in part_rows]
        places = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        packed = torch.from_numpy(pages.take(sum(places)))
    matrices, jobs, source, target = list[CMatrix](), list[tuple[Matrix, int, int, int]](), raw.data_ptr(), 0
    for rows, size in zip(part_rows, places, strict=True):
        matrix = Matrix(format.code, rows, cols, packed.data_ptr() + target, packed)
        jobs += [(matrix, source, first, row_bytes) for first in range(0, rows, ROWS_AT_ONCE)]
        matrices.append(matrix.c)
        source, target = source + rows * row_bytes, target + size
    with ThreadPoolExecutor(num_threads, "pack") as threads:
        for _ in threads.map(_pack_rows, jobs):
            pass
    return packed, matrices


def _pack_rows(job: tuple[Matrix, int, int, int]) -> None:
    """Pack some rows of a part, which begins at an address."""
    matrix, source, first, row_bytes = job
    matrix.pack(source + first * row_bytes, first, min(ROWS_AT_ONCE, matrix.rows - first))
