"""Random numbers without state: a hash of (key, position).

SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014) is a counter pushed through
a bijective mixer, so any element of its stream can be computed alone. Here the sequence's key, mixed once, chooses the
stream and the token's position is the counter: a token never depends on what else runs, nor on how often a sequence was
preempted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_MASK = (1 << 64) - 1


def key_bits(key: int) -> np.uint64:
    """Any integer -> the 64 bits that seed a stream."""
    return np.uint64(key & _MASK)


def uniforms(keys: NDArray[np.uint64], positions: NDArray[np.int64]) -> NDArray[np.float64]:
    """One number in [0, 1) with 52 random bits for each (key, position); both arrays [rows]."""
    with np.errstate(over="ignore"):
        streams = _mix(keys + _GAMMA)
        bits = _mix(streams + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser: a bijection of 64 bits in which every input bit reaches every output bit."""
    x = (x ^ (x >> np.uint64(30))) * _MULTIPLIERS[0]
    x = (x ^ (x >> np.uint64(27))) * _MULTIPLIERS[1]
    return x ^ (x >> np.uint64(31))
