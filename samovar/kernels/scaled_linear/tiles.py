"""Which kernel multiplies how many tokens with a weight of small numbers, as plain data: no Triton here.

What `kernels/linear/tiles.py` says of plain weights holds here with a byte a weight: the bytes under way count.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from samovar.kernels.linear.tiles import power_of_two


@dataclass(frozen=True, slots=True)
class GemvTile:
    """One token: each of `programs` rounds the input once, and then takes `rows` whole rows of the weight (of each part,
    if gated) after the other."""

    rows: int
    programs: int
    warps: int = 4


@dataclass(frozen=True, slots=True)
class DotTile:
    """One program of the tiled kernel: `tokens` x `rows` results, `depth` inputs at a time, `stages` of them in flight.

    With `splits` > 1 several programs share the inputs of one result; their partial sums are added in a fixed order.
    `ahead` columns of its weights, a power of two, each program asks for before the kernel ahead has ended; with 0 it
    starts after that.
    """

    tokens: int
    rows: int
    depth: int = 128
    splits: int = 1
    warps: int = 4
    stages: int = 4
    ahead: int = 0

    def shared_bytes(self, parts: int) -> int:
        """Shared memory for all stages."""
        return self.stages * self.depth * (self.tokens + parts * self.rows)


MOST_COLUMNS = 1 << 14
"""The longest rows, as a power of two, that the GEMV holds."""
PROGRAMS = 528
"""Programs of the GEMV: four for each of an H200's 132 multiprocessors."""
MOST_TOKENS = {1: 64, 2: 128}
"""Parts of a weight -> the most tokens for which the tiled kernel is used where torch has a scaled product."""
ENOUGH_PROGRAMS = 200
"""Programs of the tiled kernel below which it is split."""
AHEAD, MOST_TOKENS_AHEAD, MOST_AHEAD = 1024, 16, 528
"""See `kernels/linear/tiles.py`."""


def gemv_tile(n: int, k: int, parts: int = 1) -> GemvTile:
    """The tile for one token and a weight of `parts` times [n, k]."""
    columns = max(power_of_two(k), 32)
    warps = min(8, max(1, columns // 1024))
    rows = 1 if columns >= 8192 else max(1, min(8192 // columns, 8) // parts)
    while rows > 1 and n < PROGRAMS * rows:
        rows //= 2
    programs = PROGRAMS if warps <= 4 else PROGRAMS // 2
    return GemvTile(rows, min(programs, -(-n // rows)), warps)


def dot_tile(tokens: int, n: int, k: int, parts: int = 1) -> DotTile:
    """The tile for a few tokens and a weight of `parts` times [n, k], up to 128 tokens in one row of programs."""
    width = min(max(power_of_two(tokens), 16), 128)
    if width > 64:
        return DotTile(width, 128 // parts, warps=8)
    if parts == 2:
        return DotTile(width, 64, stages=4)
    programs, splits = -(-n // 64), 1
    while splits < 8 and programs * splits < ENOUGH_PROGRAMS and k >= 1024 * splits:
        splits *= 2
    ahead = AHEAD if tokens <= MOST_TOKENS_AHEAD and programs * splits <= MOST_AHEAD else 0
    return DotTile(width, 64, splits=splits, stages=4 if k > 512 * splits else 3, ahead=ahead)


def wide_tile(parts: int = 1) -> DotTile:
    """The tile for many tokens, where torch has no product."""
    return DotTile(128, 128 // parts, warps=8, stages=3)


def fixed_tile(parts: int = 1) -> DotTile:
    """The one tile of deterministic mode: a result must not depend on how many others are computed beside it."""
    return DotTile(64, 128 // parts, stages=3)


@lru_cache(maxsize=4096)
def choose_tile(
    tokens: int, n: int, k: int, parts: int, shared: int, *, has_product: bool
) -> GemvTile | DotTile | None:
    """How to multiply `tokens` tokens with `parts` times [n, k]; None leaves it to torch, if `has_product` for these.

    A tile that takes more than `shared` bytes gets fewer stages.
    """
    if tokens == 1 and k <= MOST_COLUMNS and k % 16 == 0:
        return gemv_tile(n, k, parts)
    if has_product and tokens > MOST_TOKENS[parts]:
        return None
    tile = dot_tile(tokens, n, k, parts) if tokens <= 128 else wide_tile(parts)
    return fitted(tile, parts, shared)


def fitted(tile: DotTile, parts: int, shared: int) -> DotTile:
    """`tile` with as many of its stages as fit into `shared` bytes, at least two."""
    stages = tile.stages
    while stages > 2 and stages * tile.shared_bytes(parts) // tile.stages > shared:
        stages -= 1
    return DotTile(tile.tokens, tile.rows, tile.depth, tile.splits, tile.warps, stages, tile.ahead)
