"""Which part of a head one program computes. Only the sums over keys are shared, so columns of values are independent."""

from __future__ import annotations

from typing import NamedTuple


class StepTile(NamedTuple):
    """One token: `columns` values of a head."""

    columns: int
    warps: int


class PassTile(NamedTuple):
    """One chunk after the other: `columns` values of a head; `stages` chunks are on their way from memory."""

    columns: int
    warps: int
    stages: int


STEP = StepTile(8, 1)
PREPARE_WARPS = 4
WIDE = PassTile(64, 4, 3)
NARROW = PassTile(32, 4, 1)


def pass_tile(shared_bytes: int, itemsize: int) -> PassTile:
    """The tile for a chip with `shared_bytes` for a block. It does not depend on how many sequences there are, so that a
    row is computed alike among others."""
    return WIDE if shared_bytes > 200 << 10 and itemsize == 2 else NARROW
