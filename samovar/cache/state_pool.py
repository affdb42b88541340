"""StatePool: the states of recurrent layers, one row for each sequence that runs and for each snapshot of one.

Rows 0 to num_slots - 1 belong to the sequences in those slots, row num_slots is the spare one of rows that only fill a
graph, and those behind it hold snapshots. Which snapshot is whose is not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from samovar.core.cache_spec import StateSpec


class StatePool:
    """`layers` has, for each recurrent layer, one tensor for each of its spec's: [rows, *shape], contiguous.

    Everything is queued in the order of the calls: on a GPU the host waits for nothing, so a row may be given away while
    launched steps still write to it.
    """

    def __init__(
        self, specs: Sequence[StateSpec], num_slots: int, num_snapshots: int, device: torch.device | str = "cpu"
    ) -> None:
        self.num_rows = num_slots + 1 + num_snapshots
        # Zeros that nobody has written to cost a CPU no memory.
        self.layers: list[tuple[torch.Tensor, ...]] = [
            tuple(
                torch.zeros((self.num_rows, *tensor.shape), dtype=getattr(torch, tensor.dtype), device=device)
                for tensor in spec.tensors
            )
            for spec in specs
        ]
        self._rows: dict[int, list[list[torch.Tensor]]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes reserved, touched or not."""
        return sum(tensor.nbytes for layer in self.layers for tensor in layer)

    def clear(self, rows: Iterable[int]) -> None:
        """Make `rows` those of sequences that have not begun."""
        for row in rows:
            for tensors in self._row(row):
                torch._foreach_zero_(tensors)

    def copy(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy whole rows, as (source, target), one after the other."""
        for source, target in pairs:
            for old, new in zip(self._row(target), self._row(source), strict=True):
                torch._foreach_copy_(old, new)

    def _row(self, row: int) -> list[list[torch.Tensor]]:
        """One row of every tensor, by type: some hundred views, made once, which few kernels copy where types are equal."""
        found = self._rows.get(row)
        if found is None:
            if not 0 <= row < self.num_rows:
                raise ValueError(f"row {row} of the recurrent state is outside 0..{self.num_rows - 1}")
            by_type: dict[torch.dtype, list[torch.Tensor]] = {}
            for layer in self.layers:
                for tensor in layer:
                    by_type.setdefault(tensor.dtype, []).append(tensor[row])
            found = self._rows[row] = list(by_type.values())
        return found
