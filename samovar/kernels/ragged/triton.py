"""Where a tile of rows lies: see the package."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def locate(first_rows: tl.tensor, sequences: tl.tensor, number: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """(sequence, its first row, its rows, first row of the tile inside of it); the last is not below the rows for tiles
    that have nothing to do."""
    before = tl.full((), 0, tl.int32)
    for start in range(0, sequences, 128):
        index = start + tl.arange(0, 128)
        first = tl.load(first_rows + index, mask=index < sequences, other=1 << 30)
        before += tl.sum((first // SIZE + index <= number).to(tl.int32), 0)
    sequence = before - 1
    first = tl.load(first_rows + sequence)
    rows = tl.load(first_rows + sequence + 1) - first
    return sequence, first, rows, (number - first // SIZE - sequence) * SIZE
