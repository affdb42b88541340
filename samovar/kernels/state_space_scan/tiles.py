"""Tiles of the state-space scan on GPUs."""

from __future__ import annotations

from typing import NamedTuple


class ScanTile(NamedTuple):
    """A program holds `columns` channels of a head's state, and takes `tokens` at a time; one each for decoding."""

    columns: int
    tokens: int
    warps: int
    stages: int = 1

    def shared_bytes(self, n: int, element_size: int) -> int:
        """What the operands of its products take at most, for states of `n` numbers a channel."""
        operands = 2 * self.tokens * n + 2 * self.tokens * self.columns + self.columns * n + self.tokens**2
        return operands * element_size * self.stages


SINGLE = ScanTile(16, 1, 4)
CHUNKS = (ScanTile(32, 32, 4), ScanTile(16, 32, 4), ScanTile(16, 16, 4))
"""From the most work at a time on. With 64 tokens or channels Hopper's products for groups of warps come into play, and
32 channels by 64 tokens gave wrong sums on an H200 (Triton 3.6): none of those is used until that is understood."""
ENOUGH = 256
"""Programs that keep a chip busy."""


def scan_tile(programs: int, dim: int, n: int, element_size: int, shared: int) -> ScanTile:
    """The largest tile of `CHUNKS` that leaves enough programs, `programs` being heads of all sequences, and that fits."""
    fitting = [tile for tile in CHUNKS if tile.shared_bytes(n, element_size) <= shared and tile.columns <= max(dim, 16)]
    for tile in fitting:
        if programs * -(-dim // tile.columns) >= ENOUGH:
            return tile
    return next((tile for tile in fitting if tile.columns == CHUNKS[-1].columns), CHUNKS[-1])
