"""Program: instructions over values, and which values may share memory.

A value is what one instruction makes and others read, one row for each token or for each row that is wanted. Nothing
here has an address yet: operands are functions that give one once the model is loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from samovar.native.abi import Count, Op

LINE = 16
"""Numbers of a cache line: rows of a value begin on one."""

Address = Callable[[], int]
"""Where an operand is, asked once weights and cache exist."""


@dataclass(frozen=True, slots=True, eq=False)
class Value:
    """Rows of `width` numbers. A view is `parent` from column `offset` on."""

    width: int
    parent: Value | None = None
    offset: int = 0

    @property
    def root(self) -> Value:
        """The value whose memory it is."""
        return self if self.parent is None else self.parent


@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation; the fields are those of the library's. Results that are also read stand in `inputs`, too."""

    op: Op
    inputs: tuple[Value | None, ...] = ()
    outputs: tuple[Value | None, ...] = ()
    i: tuple[int, ...] = ()
    f: tuple[float, ...] = ()
    p: tuple[Address | None, ...] = ()
    rows: Count = Count.TOKENS
    adds: bool = False
    """Its result is added to what is there."""

    def values(self) -> list[Value]:
        """Everything it reads or writes."""
        return [value for value in (*self.inputs, *self.outputs) if value is not None]

    def replaced(self, other: dict[Value, Value], rows: Count) -> Instruction:
        """The same over other values and another number of rows."""
        inputs, outputs = (
            tuple(None if value is None else other.get(value, value) for value in values)
            for values in (self.inputs, self.outputs)
        )
        return dataclasses.replace(self, inputs=inputs, outputs=outputs, rows=rows)


@dataclass(frozen=True, slots=True)
class Program:
    """Instructions in order. `kept` are values that live outside of it: they get no memory here."""

    instructions: tuple[Instruction, ...]
    kept: tuple[Value, ...] = ()

    def places(self) -> tuple[dict[Value, int], int]:
        """(column where each value's memory begins, columns in all): values that are never needed together share."""
        lives: dict[Value, list[int]] = {}
        for at, instruction in enumerate(self.instructions):
            for value in instruction.values():
                if value.root not in self.kept:
                    lives.setdefault(value.root, [at, at])[1] = at
        slots: list[_Slot] = []
        owners: dict[Value, _Slot] = {}
        for value, (first, last) in sorted(lives.items(), key=lambda item: item[1]):
            free = [slot for slot in slots if slot.busy_until < first]
            width = padded(value.width)
            if free:
                # The narrowest that is wide enough, else the widest, which grows.
                slot = min(free, key=lambda slot: (slot.width < width, abs(slot.width - width)))
                slot.width = max(slot.width, width)
            else:
                slot = _Slot(width)
                slots.append(slot)
            slot.busy_until = last
            owners[value] = slot
        columns, starts = 0, {}
        for slot in slots:
            starts[id(slot)] = columns
            columns += slot.width
        return {value: starts[id(slot)] for value, slot in owners.items()}, columns


@dataclass(slots=True, eq=False)
class _Slot:
    """Memory of one value at a time."""

    width: int
    busy_until: int = field(default=-1)


def padded(width: int) -> int:
    """Columns that a row of `width` numbers takes."""
    return -(-width // LINE) * LINE


def total_columns(programs: Sequence[Program]) -> int:
    """Columns of memory that is enough for each of `programs`."""
    return max(program.places()[1] for program in programs)
