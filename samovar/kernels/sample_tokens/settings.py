"""How one slot samples, as a row of a table that NumPy fills and kernels read."""

from __future__ import annotations

import numpy as np

from samovar.kernels.sample_tokens.random_numbers import key_bits

SLOT_SETTINGS = np.dtype(
    [
        ("scale", np.float64),  # 1 / temperature, rounded to float32; 0 for greedy
        ("margin", np.float64),  # log(min_p), rounded to float32: a score may lie so far under the best; -inf for off
        ("top_p", np.float64),  # 1 for off
        ("top_k", np.int64),  # 0 for off; below the vocabulary
        ("key", np.uint64),  # chooses the stream of random numbers
    ]
)
"""Five numbers of 8 bytes: kernels see a row of five int64, whose bits are these."""

COLUMNS = len(SLOT_SETTINGS.names or ())
"""Numbers in a row."""


def greedy(num_slots: int) -> np.ndarray:
    """A table of slots that take the most probable token; `num_slots` rows of `SLOT_SETTINGS`."""
    table = np.zeros(num_slots, SLOT_SETTINGS)
    table["margin"], table["top_p"] = -np.inf, 1.0
    return table


def make(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, key: int = 0) -> np.void:
    """One row. Temperature 0 is greedy and takes no account of the rest."""
    row: np.void = greedy(1)[0]
    if temperature > 0:
        row["scale"] = 1 / np.float32(temperature)
        row["top_k"], row["top_p"] = top_k, top_p
        row["margin"] = np.float32(np.log(min_p)) if min_p > 0 else -np.inf
    row["key"] = key_bits(key)
    return row
