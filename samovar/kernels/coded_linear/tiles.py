"""Which kernel multiplies how many tokens with a packed weight of which shape, as plain data: no Triton here.

A weight of 4.5 bits is read in a quarter of the time of a plain one, so that a program's share is soon over: more splits,
and deeper tiles.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from samovar.kernels.coded_weights import KINDS
from samovar.kernels.linear.tiles import DotTile, power_of_two

BITS = 4.5
"""Of a weight of four bits, with its scale; of eight bits it takes twice as many."""
MOST_TOKENS = {1: 256, 2: 512}
"""Parts of a weight -> the most tokens for which the kernel that decodes on the way is used: decoding a weight for cuBLAS
takes longer than decoding it for each 128 tokens until then."""
WORKSPACE_BYTES = 64 << 20
"""Most decoded weights that exist at once: the memory plan counts with it."""
PROGRAMS = 264
"""Programs of a split product that suffice: two for each multiprocessor of an H200."""
MOST_SPLITS = {8: 8, 16: 8, 32: 4, 64: 4, 128: 2}
"""Tokens of a tile -> most programs that share a result; joining sums costs the more, the more tokens there are."""

TILES: dict[int, dict[int, DotTile]] = {
    1: {
        8: DotTile(8, 64, 128, stages=3, ahead=8),
        16: DotTile(16, 64, 128, stages=4, ahead=8),
        32: DotTile(32, 64, 128, stages=3),
        64: DotTile(64, 64, 128, stages=3),
        128: DotTile(128, 64, 128, stages=3),
    },
    2: {
        8: DotTile(8, 64, 256, stages=3, ahead=8),
        16: DotTile(16, 64, 128, stages=4, ahead=8),
        32: DotTile(32, 64, 128, stages=3),
        128: DotTile(128, 64, 64, stages=3),
    },
}
"""Parts -> tile by the most tokens in it, before splits. Deep tiles are best where a product is waited for (see `_settled`
in `triton.py`): the decoder of one program works while the tensor cores do for another."""
_refused: set[tuple[str, int, int, int, int]] = set()
"""Kind, rows, inputs, parts and most tokens of tiles of which this process's GPU computed wrong sums."""


def width_of(tokens: int) -> int:
    """The most tokens of a tile that is used for `tokens`."""
    return min(max(power_of_two(tokens), 8), 128)


def refuse(kind: str, n: int, k: int, parts: int, tokens: int) -> bool:
    """Leave products of this shape with so many tokens to cuBLAS from now on; False if they were left to it already."""
    wrong = (kind, n, k, parts, width_of(tokens))
    if wrong in _refused:
        return False
    _refused.add(wrong)
    choose_tile.cache_clear()
    return True


def shared_bytes(tile: DotTile, parts: int, kind: str = "e2m1_16") -> int:
    """Shared memory for all stages."""
    weights = int(parts * tile.rows * tile.depth * BITS * KINDS[kind].bits / 32)
    return tile.stages * (2 * tile.depth * tile.tokens + weights)


def dot_tile(tokens: int, n: int, k: int, parts: int = 1) -> DotTile | None:
    """The tile for a few tokens and a weight of `parts` times [n, k], up to 128 tokens in one row of programs."""
    tile = TILES[parts].get(width_of(tokens))
    if tile is None:
        return None
    splits, programs = 1, -(-n // tile.rows)
    while splits < MOST_SPLITS[tile.tokens] and programs * splits * parts < PROGRAMS and k >= 8 * splits * tile.depth:
        splits *= 2
    return replace(tile, splits=splits)


def fixed_tile(parts: int = 1) -> DotTile:
    """The one tile of deterministic mode: a result must not depend on how many others are computed beside it."""
    return DotTile(tokens=64, rows=128 // parts, depth=64, warps=8 // parts, stages=3)


@lru_cache(maxsize=4096)
def choose_tile(tokens: int, n: int, k: int, parts: int, shared: int, kind: str = "e2m1_16") -> DotTile | None:
    """How to multiply `tokens` tokens with `parts` times [n, k]; None leaves it to cuBLAS, with a decoded weight.

    A tile that takes more than `shared` bytes, or a gated product that cuts bricks, is not used.
    """
    if not 0 < tokens <= MOST_TOKENS[parts] or (parts == 2 and n % 16):
        return None
    # Rows of inputs that start anywhere cannot be copied 16 bytes at a time.
    if k % 8:
        return None
    if (kind, n, k, parts, width_of(tokens)) in _refused:
        return None
    tile = dot_tile(tokens, n, k, parts)
    return tile if tile is not None and shared_bytes(tile, parts, kind) <= shared else None
