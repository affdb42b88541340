"""The gated delta net (Yang, Kautz and Hatamizadeh, 2024): what it projects, its rule, its norm. Sizes are logical: ranks have
whole key heads, and the value heads that go with them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samovar.core.cache_spec import StateSpec, StateTensor
from samovar.kernels.gated_delta_rule import gated_delta_rule
from samovar.kernels.gated_rms_norm import gated_rms_norm
from samovar.kernels.sigmoid_mul import sigmoid_mul
from samovar.layers.arranged import ArrangedLinear, Run
from samovar.layers.batch import ForwardBatch
from samovar.layers.layer import Layer, Placement, Source
from samovar.layers.recurrent import Recurrent
from samovar.layers.short_conv import Channels, sequences_of


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaSizes:
    """`heads` of values of `value_dim` numbers; neighbours share one of `key_heads` of keys and queries of `key_dim`. The
    convolution sees `conv_width` tokens; corrections are up to `beta_scale` of what is missing."""

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    beta_scale: float = 1.0

    @property
    def keys(self) -> int:
        """Numbers in the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers in the values of all heads."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> tuple[Channels, ...]:
        """What is convolved: queries, keys, values."""
        keys = Channels(self.key_heads, self.key_dim)
        return keys, keys, Channels(self.heads, self.value_dim)


class GatedDeltaInput(ArrangedLinear):
    """One product for q, k and v side by side, the output gate z, and the gates b and a of the rule.

    The checkpoint has in_proj_qkv, in_proj_z, in_proj_b and in_proj_a; or, with `by_key_head`, in_proj_qkvz and in_proj_ba,
    each key head's rows after the other's.
    """

    def __init__(self, hidden: int, s: GatedDeltaSizes, *, by_key_head: bool = False) -> None:
        mixed = 2 * s.keys + s.values
        parts = {"in_proj_qkv": mixed, "in_proj_z": s.values, "in_proj_b": s.heads, "in_proj_a": s.heads}
        if by_key_head:
            parts = {"in_proj_qkvz": mixed + s.values, "in_proj_ba": 2 * s.heads}
        super().__init__(hidden, parts)
        self.s, self.by_key_head = s, by_key_head

    def bind(self, place: Placement) -> None:
        """Allocate this rank's heads."""
        s = self.s
        place.tp.share(s.key_heads, f"the number of key heads of {self.path}")
        super().bind(place)
        self.widths = [each // place.tp.size for each in (2 * s.keys + s.values, s.values, s.heads, s.heads)]

    def runs(self, part: int) -> list[Run]:
        """See `ArrangedLinear`."""
        s, rank, size = self.s, self.tp.rank, self.tp.size
        share = s.heads // s.key_heads
        if not self.by_key_head:
            blocks = ([s.keys, s.keys, s.values], [s.values], [s.heads], [s.heads])[part]
            firsts = [sum(blocks[:i]) for i in range(len(blocks))]
            return [(first + rank * rows // size, rows // size) for first, rows in zip(firsts, blocks, strict=True)]
        wide = share * s.value_dim
        blocks = ([s.key_dim, s.key_dim, wide, wide], [share, share])[part]
        mine = range(rank * s.key_heads // size, (rank + 1) * s.key_heads // size)
        return [(head * sum(blocks) + sum(blocks[:i]), rows) for i, rows in enumerate(blocks) for head in mine]


class GatedDeltaRule(Recurrent):
    """The recurrence. `A_log` and `dt_bias` stand beside this layer in the checkpoint."""

    def __init__(self, s: GatedDeltaSizes) -> None:
        super().__init__()
        self.s = s

    def bind(self, place: Placement) -> None:
        """Allocate this rank's heads and choose the kernel."""
        self.shard = (place.tp.rank, place.tp.size)
        self.key_heads, self.heads = (each // place.tp.size for each in (self.s.key_heads, self.s.heads))
        self.rates, self.dt_bias = (place.empty(self.heads, dtype=torch.float32) for _ in range(2))
        self.rule = place.kernels.use(gated_delta_rule)

    def sources(self) -> list[Source]:
        """What stands beside this layer."""
        parent, split = self.path.rpartition(".")[0], (0, self.shard) if self.shard[1] > 1 else (None, (0, 1))
        own = {"A_log": self.rates, "dt_bias": self.dt_bias}
        return [Source(self.stored(f"{parent}.{name}"), tensor, *split) for name, tensor in own.items()]

    def after_load(self) -> None:
        """Rates are stored as logarithms of their sizes."""
        self.rates = -self.rates.exp()

    def state_spec(self) -> StateSpec:
        """A matrix for each head."""
        return StateSpec((StateTensor("memory", (self.heads, self.s.value_dim, self.s.key_dim), "float32"),))

    def forward(self, mixed: torch.Tensor, b: torch.Tensor, a: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q, k, v side by side [tokens, channels], b, a [tokens, heads] -> [tokens, heads * value_dim]."""
        s, heads = self.s, (self.key_heads, self.key_heads, self.heads)
        dims = (s.key_dim, s.key_dim, s.value_dim)
        parts = torch.split(mixed, [count * dim for count, dim in zip(heads, dims)], dim=1)
        q, k, v = (part.view(len(part), *shape) for part, shape in zip(parts, zip(heads, dims)))
        gates = (a, b, self.rates, self.dt_bias)
        return self.rule(q, k, v, *gates, self.state[0], *sequences_of(batch), s.beta_scale).flatten(1)


class GatedHeadsNorm(Layer):
    """norm(y) * silu(gate) of every head; all heads share the weight [head_dim]."""

    is_row_wise = True

    def __init__(self, head_dim: int, eps: float) -> None:
        super().__init__()
        self.head_dim, self.eps = head_dim, eps

    def bind(self, place: Placement) -> None:
        """Allocate the weight."""
        self.weight = place.empty(self.head_dim)
        self.norm = place.kernels.use(gated_rms_norm)

    def sources(self) -> list[Source]:
        """The weight."""
        return [Source(self.stored(f"{self.path}.weight"), self.weight)]

    def forward(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """y, gate [tokens, heads * head_dim] -> the same shape."""
        return self.norm(y, gate, self.weight, self.eps, self.head_dim, True)


class SigmoidGate(Layer):
    """y * sigmoid(gate)."""

    is_row_wise = True

    def bind(self, place: Placement) -> None:
        """Choose the kernel."""
        self.gated = place.kernels.use(sigmoid_mul)

    def forward(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """y, gate [tokens, dim], whose rows may lie apart -> [tokens, dim]."""
        return self.gated(y, gate)
