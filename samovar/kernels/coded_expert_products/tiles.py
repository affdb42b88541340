"""Which tiles compute how many tokens through packed experts, as plain data: no Triton here."""

from __future__ import annotations

from dataclasses import dataclass

from samovar.kernels.coded_linear.tiles import shared_bytes
from samovar.kernels.expert_products.tiles import MOST_UNSORTED, power_of_two
from samovar.kernels.linear.tiles import DotTile

TILES: dict[int, tuple[DotTile, DotTile]] = {
    8: (DotTile(8, 64, 128, stages=3), DotTile(8, 64, 128, stages=3)),
    16: (DotTile(16, 64, 128, stages=4), DotTile(16, 64, 128, stages=4)),
    32: (DotTile(32, 64, 128, stages=3), DotTile(32, 64, 128, stages=3)),
    64: (DotTile(64, 64, 64, stages=3), DotTile(64, 64, 128, stages=3)),
    128: (DotTile(128, 64, 64, stages=3), DotTile(128, 64, 128, stages=3)),
}
"""Tiles (gate and up, down) by the most tokens of one expert in them."""
FIXED_TOKENS = 64
"""Tokens of a tile in deterministic mode, whatever the batch."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Tiles of both products, and whether pairs are sorted by expert first."""

    gate_up: DotTile
    down: DotTile
    is_sorted: bool


def plan(tokens: int, top_k: int, experts: int, *, kind: str, shared: int) -> Plan:
    """The plan for `tokens` tokens that choose `top_k` of `experts` experts; a chip with little memory gets narrow tiles."""
    is_sorted = tokens > MOST_UNSORTED
    width = power_of_two(2 * tokens * top_k // experts) if is_sorted else power_of_two(tokens)
    return _fitting(min(max(width, 16 if is_sorted else 8), 128), kind, shared, is_sorted=is_sorted)


def fixed_plan(*, kind: str, shared: int) -> Plan:
    """The one plan of deterministic mode."""
    return _fitting(FIXED_TOKENS, kind, shared, is_sorted=True)


def _fitting(width: int, kind: str, shared: int, *, is_sorted: bool) -> Plan:
    while max(shared_bytes(tile, 2 - at, kind) for at, tile in enumerate(TILES[width])) > shared and width > 16:
        width //= 2
    return Plan(*TILES[width], is_sorted)
