"""Tiles of rows that belong to one sequence each, for kernels whose batch is the rows of many, one after the other.

Sequence i begins at row `first_rows[i]`. Its tiles have the numbers from first_rows[i] // size + i on, which leaves every
sequence as many as it needs and is found without a list from the host: a grid of `most_tiles` programs has them all, and
some that have nothing to do.
"""

from __future__ import annotations


def most_tiles(tokens: int, sequences: int, size: int) -> int:
    """Upper bound of the numbers of tiles of `size` rows."""
    return tokens // size + sequences
