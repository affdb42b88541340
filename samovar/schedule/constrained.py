"""Constrained sequences: each has a matcher that says which tokens may come next. Seen from the scheduler only as this.

A matcher is made off the step loop, because compiling a grammar takes a while; until it is there its sequence is held
back and others go on. A constrained sequence is never scheduled while a token of it is in flight, so a matcher has
always seen every token when it is asked for a mask. It stays with its sequence through preemptions.
"""

from __future__ import annotations

from typing import Protocol

from samovar.core.constraint import Constraint
from samovar.core.request import Request
from samovar.core.step import DecodeSequences, TokenMasks
from samovar.errors import ValidationError
from samovar.schedule.draft import Draft
from samovar.schedule.live import LiveSequence, TokenMatcher


class Enforcer(Protocol):
    """Makes matchers, and asks them. Its answers are always about tokens that were accepted before."""

    def begin(self, constraint: Constraint) -> Beginning:
        """Start to make one, on another thread."""
        ...

    def masks(self, rows: list[tuple[int, TokenMatcher]]) -> TokenMasks | None:
        """What each slot's matcher allows; None if all allow everything. What goes wrong is in `TokenMatcher.error`."""
        ...


class Beginning(Protocol):
    """A matcher in the making; a `concurrent.futures.Future` is one."""

    def done(self) -> bool: ...

    def result(self) -> TokenMatcher:
        """The matcher, or raises why there is none. Asked only when `done`."""
        ...

    def cancel(self) -> bool: ...


class Constraints:
    """The matchers of one scheduler's sequences, and the sequences that are held back for want of one."""

    def __init__(self, enforcer: Enforcer | None) -> None:
        self._enforcer = enforcer
        self._beginnings: dict[LiveSequence, Beginning] = {}
        self._held: dict[LiveSequence, None] = {}
        self._num_live = 0

    def check(self, request: Request) -> None:
        """Raise `ValidationError` for a request that could not be held to its constraint."""
        if request.constraint is not None and self._enforcer is None:
            message = "structured_outputs: this engine runs without a tokenizer and cannot enforce a grammar"
            raise ValidationError(message, parameter="structured_outputs")

    def begin(self, sequences: list[LiveSequence]) -> None:
        """Start to make one matcher for each choice of a request, if it is constrained."""
        for sequence in sequences:
            constraint = sequence.request.constraint
            if constraint is not None and self._enforcer is not None:
                self._beginnings[sequence] = self._enforcer.begin(constraint)
                self._num_live += 1

    def holds_back(self, sequence: LiveSequence) -> bool:
        """Whether a sequence that would join the queue must wait for its matcher; if so it is kept here."""
        if sequence not in self._beginnings:
            return False
        self._held[sequence] = None
        return True

    @property
    def held(self) -> list[LiveSequence]:
        """Those held back, in the order in which they came."""
        return list(self._held)

    def settle(self) -> tuple[list[LiveSequence], list[tuple[LiveSequence, str]]]:
        """(sequences held back no longer, sequences whose matcher could not be made and why). Cheap if there are none."""
        ready, failed = list[LiveSequence](), list[tuple[LiveSequence, str]]()
        for sequence in [s for s, beginning in self._beginnings.items() if beginning.done()] if self._num_live else ():
            try:
                sequence.matcher = self._beginnings.pop(sequence).result()
            except Exception as error:
                # The border to what compiles grammars: whatever it raises ends this sequence and nobody else's.
                failed.append((sequence, f"the constraint cannot be enforced: {error or type(error).__name__}"))
            else:
                if sequence in self._held:
                    del self._held[sequence]
                    ready.append(sequence)
        return ready, failed

    def drop(self, sequence: LiveSequence) -> bool:
        """A sequence ended: let go of its matcher. Returns whether it was held back."""
        if sequence.request.constraint is not None:
            self._num_live -= 1
            sequence.matcher = None
            beginning = self._beginnings.pop(sequence, None)
            if beginning is not None:
                beginning.cancel()
        if sequence not in self._held:
            return False
        del self._held[sequence]
        return True

    def masks(self, draft: Draft) -> TokenMasks | None:
        """The masks of a step's rows that sample."""
        if not self._num_live or self._enforcer is None:
            return None
        if isinstance(draft.rows, DecodeSequences):
            slots: list[int | None] = list(draft.rows.slots)
        else:
            slots = [row.slot if row.samples else None for row in draft.rows]
        rows = [
            (slot, sequence.matcher)
            for slot, sequence in zip(slots, draft.sequences, strict=True)
            if sequence.matcher is not None and slot is not None
        ]
        return self._enforcer.masks(rows) if rows else None
