"""Weights that take the form in which the CPU library holds them once they were loaded: blocks of integers, or numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise

import torch

from samovar.native.abi import CMatrix
from samovar.quant.decoded import BLOCK_ROWS
from samovar.quant.formats import BLOCKS, WeightFormat
from samovar.quant.numbers.ggml_blocks import encode, narrowest
from samovar.quant.packed import Packed
from samovar.quant.packing import pack
from samovar.quant.stored import Stored

Integers = tuple[torch.Tensor, torch.Tensor]
"""Integers int8 [rows, in] and their scales float16 [rows, blocks]."""
WEIGHTS_AT_ONCE = 1 << 18
"""Weights that a thread works on: intermediates stay in the CPU's cache."""


class Held(Packed):
    """Weights that take the form in which they are held once they were loaded, part by part."""

    def _pack(self, parts: Iterable[tuple[WeightFormat, torch.Tensor, int]]) -> dict[str, torch.Tensor]:
        """Pack every part: its format, what a checkpoint would store, and its rows."""
        packed, matrices, formats = dict[str, torch.Tensor](), list[CMatrix](), []
        for part, (format, raw, rows) in enumerate(parts):
            formats.append(format)
            packed[f"weight.{part}"], described = pack(
                format, raw, [rows], self.products.num_threads, self.products.pages
            )
            matrices += described
        self.formats, self.matrices = tuple(formats), (CMatrix * len(matrices))(*matrices)
        return packed

    def hold_integers(self, parts: Iterable[Integers]) -> dict[str, torch.Tensor]:
        """Every part in the narrowest blocks that hold its integers."""

        def blocks(levels: torch.Tensor, scale: torch.Tensor) -> tuple[WeightFormat, torch.Tensor, int]:
            name = narrowest(int(levels.min()), int(levels.max()))
            assert name is not None, "integers of a byte fit the widest blocks"
            return BLOCKS[name], encode(name, levels, scale), len(levels)

        return self._pack(blocks(*part) for part in parts)

    def hold_numbers(self, method: Stored, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What `method` has as `weights`, as plain numbers."""
        ends = [0, *accumulate(method.part_rows)]
        dtype, num_threads = self.plain.dtype, self.products.num_threads

        def numbers(part: int, first: int, count: int) -> tuple[WeightFormat, torch.Tensor, int]:
            memory = self.products.pages.take(count * method.num_inputs * dtype.itemsize)
            raw = torch.from_numpy(memory).view(dtype).view(count, method.num_inputs)

            def fill(rows: slice) -> None:
                raw[rows] = method.rows(weights, first + rows.start, rows.stop - rows.start, part)

            by_rows(fill, count, method.num_inputs, num_threads)
            return self.plain, raw, count

        return self._pack(numbers(part, first, end - first) for part, (first, end) in enumerate(pairwise(ends)))


def by_rows(work: Callable[[slice], None], num_rows: int, num_inputs: int, num_threads: int) -> None:
    """Do `work` on all rows, a few at a time, on threads."""
    step = max(1, WEIGHTS_AT_ONCE // num_inputs // BLOCK_ROWS) * BLOCK_ROWS

    def run(first: int) -> None:
        with torch.inference_mode():  # a thread begins outside of it, and may then not write to tensors made inside
            work(slice(first, min(num_rows, first + step)))

    with ThreadPoolExecutor(num_threads, "hold") as threads:
        for _ in threads.map(run, range(0, num_rows, step)):
            pass
