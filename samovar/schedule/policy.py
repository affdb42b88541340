"""Policies and WaitingQueue: the order in which sequences are admitted, and the reverse order of preemption.

A policy is a function from a request to a rank; lower ranks go first. The rank never changes, so a preempted
sequence returns to its old place, which is in front of everything that arrived later.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from samovar.core.request import Request
from samovar.schedule.live import LiveSequence, Rank

Policy = Callable[[Request, int], Rank]
"""(request, running number of the request) -> rank of its sequences, before the choice index is appended."""


def fcfs(request: Request, order: int) -> Rank:
    """First come, first served."""
    return (order,)


def priority(request: Request, order: int) -> Rank:
    """Lower priority values first, then earlier arrivals."""
    return (request.priority, request.arrival, order)


POLICIES: dict[str, Policy] = {"fcfs": fcfs, "priority": priority}


class WaitingQueue:
    """Sequences that wait, lowest rank first: O(log n) to add and take, O(1) amortised to remove from anywhere."""

    def __init__(self) -> None:
        self._heap: list[tuple[Rank, LiveSequence]] = []
        self._members: set[LiveSequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: object) -> bool:
        return sequence in self._members

    def add(self, sequence: LiveSequence) -> None:
        """Enter a sequence that is not in the queue."""
        self._members.add(sequence)
        heapq.heappush(self._heap, (sequence.rank, sequence))

    def peek(self) -> LiveSequence | None:
        """The sequence to admit next."""
        heap = self._heap
        while heap and heap[0][1] not in self._members:
            heapq.heappop(heap)
        return heap[0][1] if heap else None

    def remove(self, sequence: LiveSequence) -> None:
        """Take a sequence out, the front one for admission or any one for good.

        The place of one that was not in front goes when it surfaces, or when such places are the majority.
        """
        self._members.remove(sequence)
        if self._heap[0][1] is sequence:
            heapq.heappop(self._heap)
        if len(self._heap) > 2 * len(self._members) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
