"""Axis: rank and size along one direction of the mesh, with the collectives layers need. An axis of size 1 is free."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from samovar.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of the mesh as seen by this rank. `group` is the process group of the ranks along it (None: all)."""

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum `x` over the axis, in place; returns it."""
        if self.size > 1:
            dist.all_reduce(x, group=self.group)
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's `x` along the last axis, in rank order."""
        if self.size == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)

    def share(self, total: int, what: str) -> int:
        """This rank's part of `total`; raises `ConfigError` naming `what` if it does not divide."""
        if total % self.size:
            raise ConfigError(
                f"{what} is {total}, which does not divide over {self.size} devices: use a --tensor-parallel-size "
                f"that divides it"
            )
        return total // self.size
