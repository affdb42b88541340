"""What the memory plan sets aside for recurrent layers: states of sequences that run, snapshots, what a step needs besides."""

from __future__ import annotations

from collections.abc import Sequence

from samovar.core.cache_spec import StateSpec

STATE_SHARE = 0.5
"""Most of the memory behind everything else that the states of running sequences take: fewer of them run otherwise."""
SNAPSHOT_SHARE = 0.25
"""Part of what is left then that snapshots get, unless told otherwise; the cache gets the rest."""
SNAPSHOTS_PER_SEQUENCE = 8
"""But no more snapshots for each sequence that may run."""
STATELESS_BLOCKS = 1 << 18
"""Most blocks of a model without keys and values. They hold nothing: they count tokens, and name prefixes."""
SCAN_CHUNK = 64
"""Tokens between two states that kernels keep while they compute a step."""
SEQS_STEP = 8
"""Numbers of sequences are rounded down to multiples of this."""


def bytes_of(specs: Sequence[StateSpec]) -> int:
    """One sequence's states in all layers."""
    return sum(spec.nbytes for spec in specs)


def lines(specs: Sequence[StateSpec], num_seqs: int, tokens: int) -> tuple[tuple[str, int], ...]:
    """States of `num_seqs` sequences and a spare one, and those that exist within a step of `tokens` tokens."""
    if not specs:
        return ()
    largest = max(spec.nbytes for spec in specs)
    return (
        ("recurrent state", (num_seqs + 1) * bytes_of(specs)),
        ("recurrent workspace", -(-tokens // SCAN_CHUNK) * 2 * largest),
    )


def most_seqs(specs: Sequence[StateSpec], room: int, wanted: int) -> int:
    """How many of `wanted` sequences may run at once, where `room` bytes are left for states, snapshots and cache."""
    if not specs:
        return wanted
    most = max(int(STATE_SHARE * room) // bytes_of(specs) - 1, 1)
    return wanted if most >= wanted else most - most % SEQS_STEP if most > SEQS_STEP else most


def num_snapshots(specs: Sequence[StateSpec], room: int, num_seqs: int) -> int:
    """Snapshots unless told otherwise, where `room` bytes are left for them and the cache."""
    return min(max(int(SNAPSHOT_SHARE * room), 0) // bytes_of(specs), SNAPSHOTS_PER_SEQUENCE * num_seqs)
