"""Joint products whose rows stand in an order of their own, so that what belongs together is one run of columns."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

from samovar.errors import ConfigError
from samovar.layers.layer import Placement, Source
from samovar.layers.linear import ColumnLinear, QKVLinear
from samovar.layers.norm import head_shard
from samovar.quant.base import TensorSpec

Run = tuple[int, int]
"""(first row in the checkpoint's tensor, rows)."""


class ArrangedLinear(ColumnLinear):
    """A joint product of which each part is gathered from runs of rows of its checkpoint tensor, in order.

    A subclass says which in `runs`, and what columns its results are in `widths`, after `bind`.
    """

    widths: Sequence[int] = ()

    def runs(self, part: int) -> list[Run]:
        """This rank's rows of the tensor of `part`."""
        raise NotImplementedError(f"{type(self).__name__} does not say where its rows are")

    def sources(self) -> list[Source]:
        """One copy for each run, or one in all where nothing is moved."""
        copies, row = list[Source](), 0
        for part, (prefix, total, rows) in enumerate(
            zip(self._prefixes(), self.parts.values(), self.rows, strict=True)
        ):
            for spec in self.part_specs[part]:
                target = self.quant.part_of(self.weights, spec, part, row, rows)
                copies += self._copies(
                    self.stored(f"{prefix}.{spec.name}"), spec, target, joined(self.runs(part)), total
                )
            row += rows
        return copies

    def _copies(self, name: str, spec: TensorSpec, target: torch.Tensor, runs: list[Run], total: int) -> list[Source]:
        axis = spec.index_of("out")
        if axis is None or runs == [(0, total)]:
            return [Source(name, target)]
        per, row, found = spec.dims[axis].per, 0, list[Source]()
        if any(start % per or rows % per for start, rows in runs):
            raise ConfigError(
                f"{name} has one entry for {per} rows, and rows have to be moved by fewer: use a checkpoint with another format"
            )
        for start, rows in ((start // per, rows // per) for start, rows in runs):
            unit = gcd(gcd(start, rows), total // per)
            for piece in range(0, rows, unit):
                shard = ((start + piece) // unit, total // per // unit)
                found.append(Source(name, target.narrow(axis, row + piece, unit), axis, shard))
            row += rows
        return found

    def part(self, y: torch.Tensor, index: int) -> torch.Tensor:
        """The columns of result `index` of `project`'s y [tokens, columns]: a view."""
        first = sum(self.widths[:index])
        return y[:, first : first + self.widths[index]]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """x [tokens, in] -> its results, each [tokens, width], views of one tensor."""
        y = self.project(x)
        return tuple(self.part(y, index) for index in range(len(self.widths)))


def joined(runs: Sequence[Run]) -> list[Run]:
    """The same rows in the fewest runs."""
    found = list[Run]()
    for start, rows in runs:
        if found and sum(found[-1]) == start:
            start, rows = found[-1][0], found.pop()[1] + rows
        found.append((start, rows))
    return found


class GatedQKVLinear(ArrangedLinear, QKVLinear):
    """q, k, v and a gate of every number that attention returns. q_proj holds a query and its gate for each head; here the
    gates come first, and q, k and v behind them are what `QKVLinear` has."""

    def __init__(self, in_features: int, heads: int, kv_heads: int, head_dim: int, *, bias: bool = False) -> None:
        QKVLinear.__init__(self, in_features, heads, kv_heads, head_dim, bias=bias)
        self.heads = heads
        self.parts["q_proj"] *= 2

    def bind(self, place: Placement) -> None:
        """Allocate this rank's heads."""
        QKVLinear.bind(self, place)
        gates = self.rows[0] // 2
        self.split_heads[0] //= 2
        self.widths = [gates, gates + self.rows[1] + self.rows[2]]

    def part_shard(self, name: str, rows: int, place: Placement) -> tuple[int, int]:
        """A query and its gate are one head."""
        return head_shard(self.heads, place) if name == "q_proj" else self.shard_of(rows, place)

    def runs(self, part: int) -> list[Run]:
        """See `ArrangedLinear`."""
        (which, _), rows, dim = self.shards[part], self.rows[part], self.head_dim
        first = which * rows
        if part > 0:
            return [(first, rows)]
        return [(first + head + half, dim) for half in (dim, 0) for head in range(0, rows, 2 * dim)]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """x [tokens, in] -> q, k, v of this rank, each [tokens, heads, head_dim], and the gate [tokens, heads * head_dim]."""
        gate, qkv = ArrangedLinear.forward(self, x)
        return *self.heads_of(qkv), gate
