"""Which kernel multiplies how many tokens with a packed weight of which shape, as plain data: no Triton here.

A weight of 4.5 bits is read in a quarter of the time of a plain one, so that a program's share is soon over: more splits,
and deeper tiles. `MEASURED` has what was fastest on an H200; other shapes follow the rule in `dot_tile`.
"""

from __future__ import annotations

from functools import lru_cache

from samovar.kernels.linear.tiles import DotTile, power_of_two

BITS = 4.5
"""Of a weight, with its scale."""
MOST_TOKENS = {1: 256, 2: 512}
"""Parts of a weight -> the most tokens for which the kernel that decodes on the way is used: decoding a weight for cuBLAS
takes longer than decoding it for each 128 tokens until then."""
WORKSPACE_BYTES = 64 << 20
"""Most decoded weights that exist at once: the memory plan counts with it."""
PROGRAMS = 264
"""Programs of a split product that suffice: two for each multiprocessor of an H200."""
MOST_SPLITS = {16: 8, 32: 4, 64: 4, 128: 2}
"""Tokens of a tile -> most programs that share a result; joining sums costs the more, the more tokens there are."""

MEASURED: dict[tuple[int, int, int], dict[int, DotTile]] = {
    (1, 6144, 4096): {
        16: DotTile(16, 128, 128, 8, 8, 3, 8),
        32: DotTile(32, 64, 128, 4, 4, 3),
        64: DotTile(64, 64, 128, 4, 4, 3),
        128: DotTile(128, 64, 128, 2, 4, 3),
    },
    (1, 4096, 4096): {
        16: DotTile(16, 64, 256, 4, 4, 5, 8),
        32: DotTile(32, 64, 128, 4, 4, 3),
        64: DotTile(64, 64, 128, 2, 4, 4),
        128: DotTile(128, 64, 128, 2, 4, 4),
    },
    (2, 14336, 4096): {
        8: DotTile(16, 128, 128, 2, 8, 3, 8),
        16: DotTile(16, 64, 128, 4, 4, 3, 8),
        32: DotTile(32, 64, 64, 4, 4, 4),
        64: DotTile(64, 64, 64, 1, 4, 4),
        128: DotTile(128, 64, 64, 1, 4, 4),
    },
    (1, 4096, 14336): {
        4: DotTile(16, 128, 256, 8, 8, 3, 8),
        16: DotTile(16, 64, 256, 8, 4, 3, 8),
        32: DotTile(32, 128, 128, 4, 8, 4),
        64: DotTile(64, 64, 128, 4, 4, 4),
        128: DotTile(128, 64, 128, 4, 4, 3),
    },
}
"""(parts, rows of a part, inputs) -> tile by the most tokens that it is for, on an H200 with weights of "e2m1_16"."""


def shared_bytes(tile: DotTile, parts: int) -> int:
    """Shared memory for all stages."""
    weights = int(parts * tile.rows * tile.depth * BITS / 8)
    return tile.stages * (2 * tile.depth * tile.tokens + weights)


def dot_tile(tokens: int, n: int, k: int, parts: int = 1) -> DotTile:
    """The tile for a few tokens and a weight of `parts` times [n, k], 128 tokens in one row of programs."""
    for most, tile in sorted(MEASURED.get((parts, n, k), {}).items()):
        if min(tokens, 128) <= most:
            return tile
    width = min(max(power_of_two(tokens), 16), 128)
    depth, splits, programs = 64 if parts == 2 and width > 16 else 128, 1, -(-n // 64)
    while splits < MOST_SPLITS[width] and programs * splits * parts < PROGRAMS and k >= 8 * splits * depth:
        splits *= 2
    return DotTile(width, 64, depth, splits, stages=3, ahead=8 if width == 16 else 0)


def fixed_tile(parts: int = 1) -> DotTile:
    """The one tile of deterministic mode: a result must not depend on how many others are computed beside it."""
    return DotTile(tokens=64, rows=128 // parts, depth=64, warps=8 // parts, stages=3)


@lru_cache(maxsize=4096)
def choose_tile(tokens: int, n: int, k: int, parts: int, shared: int) -> DotTile | None:
    """How to multiply `tokens` tokens with `parts` times [n, k]; None leaves it to cuBLAS, with a decoded weight.

    A tile that takes more than `shared` bytes, or a gated product that cuts bricks, is not used.
    """
    if not 0 < tokens <= MOST_TOKENS[parts] or (parts == 2 and n % 16):
        return None
    # Rows of inputs that start anywhere cannot be copied 16 bytes at a time.
    if k % 8:
        return None
    tile = dot_tile(tokens, n, k, parts)
    return tile if shared_bytes(tile, parts) <= shared else None
