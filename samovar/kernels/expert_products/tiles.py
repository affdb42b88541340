"""Which kernels compute how many tokens through how many experts, as plain data: no Triton here.

Up to a few hundred tokens experts only wait for their weights, every expert that has a token for all of its own. One
token, and a few whose experts rarely coincide, are vectors times weights on the CUDA cores. More are tiles on the tensor
cores: up to `MOST_UNSORTED` tokens a program looks in the ids for those of its expert, beyond they are sorted first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class PairTile:
    """One program of the vector kernels: `rows` results (gate and up each), `columns` inputs at a time."""

    rows: int
    columns: int
    warps: int = 4


@dataclass(frozen=True, slots=True)
class BlockTile:
    """One program of the tiled kernel: `tokens` of one expert x `rows` results (gate and up each), `depth` inputs at a
    time, `stages` of them in flight."""

    tokens: int
    rows: int
    depth: int
    warps: int = 4
    stages: int = 3

    def shared_bytes(self, parts: int, element_size: int) -> int:
        """Shared memory for all stages."""
        return self.stages * self.depth * (self.tokens + parts * self.rows) * element_size


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch is computed: tiles of both products, and whether pairs are sorted by expert first."""

    gate_up: PairTile | BlockTile
    down: PairTile | BlockTile
    is_sorted: bool = False


MOST_AS_PAIRS = 2
"""Tokens up to which each pair of token and expert reads the expert's weights for itself."""
MOST_UNSORTED = 16
"""Tokens up to which a program finds the tokens of its expert itself: measured on an H200."""

BLOCKS: dict[int, tuple[BlockTile, BlockTile]] = {
    16: (BlockTile(16, 64, 128, stages=3), BlockTile(16, 128, 128, stages=3)),
    32: (BlockTile(32, 64, 128, stages=3), BlockTile(32, 128, 128, stages=3)),
    64: (BlockTile(64, 64, 64, warps=4, stages=3), BlockTile(64, 128, 64, warps=4, stages=4)),
    128: (BlockTile(128, 128, 64, warps=8, stages=3), BlockTile(128, 256, 64, warps=8, stages=3)),
}
"""Tiles (gate and up, down) by tokens of a tile, for 16-bit weights on a chip with Hopper's shared memory."""

FIXED_TOKENS = 64
"""Tokens of a tile in deterministic mode, whatever the batch."""


def plan(
    tokens: int,
    top_k: int,
    experts: int,
    inner: int,
    hidden: int,
    *,
    element_size: int,
    shared: int,
    has_dot: bool = True,
) -> Plan:
    """The plan for `tokens` tokens that choose `top_k` of `experts` experts of width `inner`."""
    if tokens <= MOST_AS_PAIRS or not has_dot:
        return Plan(pair_tile(hidden), pair_tile(inner))
    if tokens <= MOST_UNSORTED:
        return _blocks(max(16, power_of_two(tokens)), element_size, shared, is_sorted=False)
    # Twice what an expert gets on average: most experts' tokens fit into one tile, which reads their weights once.
    width = min(max(power_of_two(2 * tokens * top_k // experts), 16), 128)
    return _blocks(width, element_size, shared, is_sorted=True)


def fixed_plan(*, element_size: int, shared: int) -> Plan:
    """The one plan of deterministic mode."""
    return _blocks(FIXED_TOKENS, element_size, shared, is_sorted=True)


def pair_tile(inputs: int) -> PairTile:
    """Two thousand weights of each part are fetched at once, 16 bytes by every thread: measured on an H200."""
    columns = min(max(power_of_two(inputs), 32), 2048)
    if columns > inputs and columns > 1024:
        columns = 256
    return PairTile(max(2048 // columns, 1), columns)


def _blocks(tokens: int, element_size: int, shared: int, *, is_sorted: bool) -> Plan:
    gate_up, down = BLOCKS[tokens]
    return Plan(fitting(gate_up, 2, element_size, shared), fitting(down, 1, element_size, shared), is_sorted)


def fitting(tile: BlockTile, parts: int, element_size: int, shared: int) -> BlockTile:
    """`tile` with so many stages, inputs and results at a time that it fits into `shared` bytes."""
    tile = replace(tile, depth=max(16, tile.depth * 2 // element_size))
    while tile.shared_bytes(parts, element_size) > shared:
        if tile.stages > 2:
            tile = replace(tile, stages=tile.stages - 1)
        elif tile.depth > 32:
            tile = replace(tile, depth=tile.depth // 2)
        else:
            tile = replace(tile, rows=tile.rows // 2)
    return tile


def most_blocks(pairs: int, experts: int, tokens: int) -> int:
    """Blocks of `tokens` pairs, each of one expert, that `pairs` pairs can need."""
    return min(pairs, pairs // tokens + min(pairs, experts))


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`."""
    return 1 << max(number - 1, 0).bit_length()
