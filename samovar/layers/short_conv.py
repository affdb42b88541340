"""Depthwise causal convolutions over the last few tokens of a sequence, whose inputs are remembered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Literal

import torch

from samovar.core.cache_spec import StateSpec, StateTensor
from samovar.kernels.causal_conv import causal_conv
from samovar.layers.batch import ForwardBatch
from samovar.layers.layer import Placement, Source
from samovar.layers.norm import head_shard
from samovar.layers.recurrent import Recurrent


def sequences_of(batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, Sequence[int], bool]:
    """What ops with a state need to know of the sequences of a step: first rows, rows of the state, new tokens, and
    whether each has one."""
    rows = batch.sequences
    assert rows is not None, "the worker makes them for models with recurrent layers"
    return rows.first_rows, rows.state_rows, rows.new_tokens, rows.all_single


@dataclass(frozen=True, slots=True)
class Channels:
    """A run of channels of which ranks have whole pieces: `pieces` of `width` channels each. With fewer pieces than ranks
    they are copied. Inputs are multiplied by `scale`."""

    pieces: int
    width: int = 1
    scale: float = 1.0

    @property
    def count(self) -> int:
        """Channels of all pieces."""
        return self.pieces * self.width


class ShortConv(Recurrent):
    """A convolution of every channel with its own `width` weights, of the current token and those before it.

    The channels are `parts` one after the other; checkpoints hold the weights as [channels, 1, width].
    """

    def __init__(
        self, parts: Sequence[Channels], width: int, *, bias: bool = False, activation: Literal["silu"] | None = None
    ) -> None:
        super().__init__()
        self.parts, self.width, self.has_bias, self.activation = tuple(parts), width, bias, activation

    def bind(self, place: Placement) -> None:
        """Allocate this rank's channels and choose the kernel."""
        self.shards = [head_shard(part.pieces, place) for part in self.parts]
        self.rows = [part.count // count for part, (_, count) in zip(self.parts, self.shards)]
        self.dtype = place.dtype
        self.weight = place.empty(sum(self.rows), 1, self.width)
        self.bias = place.empty(sum(self.rows)) if self.has_bias else None
        self.causal_conv = place.kernels.use(causal_conv)

    def sources(self) -> list[Source]:
        """Weight and bias, in the fewest equal pieces."""
        name = self.stored(self.path)
        found = self._pieces(f"{name}.weight", self.weight)
        return found if self.bias is None else [*found, *self._pieces(f"{name}.bias", self.bias)]

    def _pieces(self, name: str, target: torch.Tensor) -> list[Source]:
        total = sum(part.count for part in self.parts)
        if len(target) == total:
            return [Source(name, target)]
        found, row, first = list[Source](), 0, 0
        for part, rows, (which, _) in zip(self.parts, self.rows, self.shards):
            start = first + which * rows
            unit = gcd(gcd(start, rows), total)
            for piece in range(0, rows, unit):
                shard = ((start + piece) // unit, total // unit)
                found.append(Source(name, target.narrow(0, row + piece, unit), 0, shard))
            first, row = first + part.count, row + rows
        return found

    def after_load(self) -> None:
        """Scaled weights do what scaled inputs would."""
        for rows, part in zip(torch.split(self.weight, self.rows), self.parts):
            if part.scale != 1.0:
                rows.mul_(part.scale)

    def state_spec(self) -> StateSpec:
        """The inputs of the tokens before, one less than a convolution sees."""
        kind = str(self.dtype).removeprefix("torch.")
        return StateSpec((StateTensor("inputs", (sum(self.rows), self.width - 1), kind),))

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x [tokens, channels of this rank] -> the same shape."""
        return self.causal_conv(x, self.weight[:, 0], self.bias, self.state[0], *sequences_of(batch), self.activation)
