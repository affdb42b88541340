"""The scans of Mamba2 and Mamba, and the layers that feed them. Sizes are logical: ranks have whole heads, or channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import silu

from samovar.core.cache_spec import StateSpec, StateTensor
from samovar.kernels.gated_rms_norm import gated_rms_norm
from samovar.kernels.selective_scan import selective_scan
from samovar.kernels.state_space_scan import state_space_scan
from samovar.layers.batch import ForwardBatch
from samovar.layers.layer import Layer, Placement, Source
from samovar.layers.linear import ColumnLinear
from samovar.layers.norm import head_shard
from samovar.layers.recurrent import Recurrent
from samovar.layers.short_conv import sequences_of


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceSizes:
    """A Mamba2 mixer: `heads` of `head_dim` channels, with `state` numbers for each channel. Heads of a group share b and c.
    The convolution sees `conv_width` tokens; steps stay within `step_limit`."""

    heads: int
    head_dim: int
    groups: int
    state: int
    conv_width: int
    has_conv_bias: bool = True
    has_bias: bool = False
    step_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def inner(self) -> int:
        """Channels of all heads."""
        return self.heads * self.head_dim


class StateSpaceInput(ColumnLinear):
    """One product for gate, x, b, c and dt, which the checkpoint holds as one tensor.

    After `bind`, `sizes` are the widths on this rank of the gate, of x, b and c together, and of dt.
    """

    def __init__(self, hidden: int, s: StateSpaceSizes) -> None:
        shared = s.groups * s.state
        parts = {"gate": s.inner, "x": s.inner, "b": shared, "c": shared, "dt": s.heads}
        super().__init__(hidden, parts, bias=s.has_bias, stored_fused=True)
        self.s = s

    def bind(self, place: Placement) -> None:
        """Allocate this rank's heads and groups."""
        super().bind(place)
        gate, x, b, c, dt = self.rows
        self.sizes = [gate, x + b + c, dt]

    def part_shard(self, name: str, rows: int, place: Placement) -> tuple[int, int]:
        """Groups are copied when there are more ranks than groups."""
        return head_shard(self.s.groups if name in ("b", "c") else self.s.heads, place)


class StateSpaceScan(Recurrent):
    """Mamba2's scan. `A_log`, `D` and `dt_bias` stand beside this layer in the checkpoint."""

    def __init__(self, s: StateSpaceSizes) -> None:
        super().__init__()
        self.s = s

    def bind(self, place: Placement) -> None:
        """Allocate this rank's heads and choose the kernel."""
        self.shard = head_shard(self.s.heads, place)
        self.heads = self.s.heads // self.shard[1]
        self.groups = self.s.groups // head_shard(self.s.groups, place)[1]
        self.rates, self.skip, self.dt_bias = (place.empty(self.heads, dtype=torch.float32) for _ in range(3))
        self.scan = place.kernels.use(state_space_scan)

    def sources(self) -> list[Source]:
        """What stands beside this layer."""
        parent, split = self.path.rpartition(".")[0], (0, self.shard) if self.shard[1] > 1 else (None, (0, 1))
        own = {"A_log": self.rates, "D": self.skip, "dt_bias": self.dt_bias}
        return [Source(self.stored(f"{parent}.{name}"), tensor, *split) for name, tensor in own.items()]

    def after_load(self) -> None:
        """Rates are stored as logarithms of their sizes."""
        self.rates = -self.rates.exp()

    def state_spec(self) -> StateSpec:
        """A matrix for each head."""
        return StateSpec((StateTensor("scan", (self.heads, self.s.head_dim, self.s.state), "float32"),))

    def forward(self, xbc: torch.Tensor, dt: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """x, b and c side by side [tokens, channels], dt [tokens, heads] -> [tokens, heads * head_dim]."""
        inner, shared = self.heads * self.s.head_dim, self.groups * self.s.state
        x, b, c = torch.split(xbc, [inner, shared, shared], dim=1)
        x = x.view(len(x), self.heads, self.s.head_dim)
        b, c = (each.view(len(x), self.groups, self.s.state) for each in (b, c))
        constants = (self.rates, self.dt_bias, self.skip, self.state[0])
        return self.scan(x, dt, b, c, *constants, *sequences_of(batch), self.s.step_limit).flatten(1)


class GatedRMSNorm(Layer):
    """norm(y * silu(gate)), or with `gates_last` norm(y) * silu(gate), of each of `groups` equal parts of a row of `dim`."""

    def __init__(self, dim: int, groups: int, eps: float, *, gates_last: bool = False) -> None:
        super().__init__()
        self.dim, self.groups, self.eps, self.gates_last = dim, groups, eps, gates_last

    def bind(self, place: Placement) -> None:
        """Allocate this rank's part of the weight."""
        self.tp = place.tp
        self.local = place.tp.share(self.dim, f"the width of {self.path}")
        self.weight = place.empty(self.local)
        self.norm = place.kernels.use(gated_rms_norm)

    def sources(self) -> list[Source]:
        """This rank's part of the weight."""
        split = (0, (self.tp.rank, self.tp.size)) if self.tp.size > 1 else (None, (0, 1))
        return [Source(self.stored(f"{self.path}.weight"), self.weight, *split)]

    def forward(self, y: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """y, gate [tokens, dim of this rank] -> the same shape."""
        size = self.dim // self.groups
        if self.local % size == 0:
            return self.norm(y, gate, self.weight, self.eps, size, self.gates_last)
        return self._across_ranks(y.float(), silu(gate.float()), size).to(y.dtype)

    def _across_ranks(self, y: torch.Tensor, gate: torch.Tensor, size: int) -> torch.Tensor:
        """A group is spread over ranks: each adds its squares where the group's are summed."""
        y = y if self.gates_last else y * gate
        first, groups = self.tp.rank * self.local, torch.zeros(len(y), self.groups, device=y.device)
        group = first // size
        groups[:, group] = y.square().sum(-1)
        mean = self.tp.all_reduce(groups)[:, group, None] / size
        y = y * torch.rsqrt(mean + self.eps) * self.weight.float()
        return y * gate if self.gates_last else y


class SelectiveScan(Recurrent):
    """Mamba's scan over `channels` with `size` numbers each. `A_log` and `D` stand beside this layer in the checkpoint."""

    def __init__(self, channels: int, size: int) -> None:
        super().__init__()
        self.channels, self.size = channels, size

    def bind(self, place: Placement) -> None:
        """Allocate this rank's channels and choose the kernel."""
        self.shard = (place.tp.rank, place.tp.size)
        self.local = place.tp.share(self.channels, f"the channels of {self.path}")
        self.rates = place.empty(self.local, self.size, dtype=torch.float32)
        self.skip = place.empty(self.local, dtype=torch.float32)
        self.scan = place.kernels.use(selective_scan)

    def sources(self) -> list[Source]:
        """What stands beside this layer."""
        parent, split = self.path.rpartition(".")[0], (0, self.shard) if self.shard[1] > 1 else (None, (0, 1))
        own = {"A_log": self.rates, "D": self.skip}
        return [Source(self.stored(f"{parent}.{name}"), tensor, *split) for name, tensor in own.items()]

    def after_load(self) -> None:
        """Rates are stored as logarithms of their sizes."""
        self.rates = -self.rates.exp()

    def state_spec(self) -> StateSpec:
        """`size` numbers for each channel."""
        return StateSpec((StateTensor("scan", (self.local, self.size), "float32"),))

    def forward(
        self, x: torch.Tensor, dt: torch.Tensor, b: torch.Tensor, c: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """x, dt [tokens, channels of this rank], b, c [tokens, size] -> [tokens, channels of this rank]."""
        return self.scan(x, dt, b, c, self.rates, self.skip, self.state[0], *sequences_of(batch))
