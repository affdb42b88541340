"""Rounds: how many tokens in a row running sequences may compute in one step, before anybody looks at them again.

A step of a small model on a CPU takes a few milliseconds, and what Python does between two steps is a tenth of that. So
where nobody waits, nobody has a prompt to compute and every sequence may run ahead of what the host has seen, a step has
several rounds, as many as fit into the time that a newcomer, an abort or a reader may be kept waiting. What a sequence
computes behind its end is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

from samovar.schedule.live import LiveSequence

MOST_ROUNDS = 4
"""More would gain less than a hundredth."""


class Rounds:
    """Plans them. `seconds` is what a step of several rounds may take; 0 for none."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._num_sequences, self._round_seconds = 0, 0.0

    def observe(self, num_sequences: int, round_seconds: float) -> None:
        """A round of so many sequences took so long."""
        self._num_sequences, self._round_seconds = num_sequences, round_seconds

    def plan(self, running: SequenceOf[LiveSequence], block_size: int, num_free: int) -> int:
        """Rounds of a step in which all of `running` take part, and nobody else; 1 or more. `num_free` blocks are left."""
        count = self._in_time(len(running))
        if count < 2:
            return 1
        for sequence in running:
            known = len(sequence.token_ids)
            count = min(count, sequence.limit - known - sequence.num_in_flight)
            if count < 2 or not (sequence.overlaps and sequence.is_started):
                return 1
            if known + sequence.num_in_flight != sequence.num_computed_tokens + 1 or sequence.parent.deferred:
                return 1
        if num_free >= len(running) * -(-count // block_size):
            return count
        missing = sum(-(-(s.num_computed_tokens + count) // block_size) - len(s.block_table) for s in running)
        return count if missing <= num_free else 1

    def _in_time(self, num_sequences: int) -> int:
        """As many as the time allows, going by the latest step of decode alone."""
        if not self._seconds or not num_sequences or not self._round_seconds:
            return 1
        growth = max(1.0, num_sequences / self._num_sequences)
        return min(int(self._seconds / (self._round_seconds * growth)), MOST_ROUNDS)
