"""Weights that are a small number, less a zero point, times a scale: all formats of checkpoints but those with tables.

After `repack`, `scale` and, if the format has them, `zero` are [out, groups]; a weight's group is its input feature
divided by the group's size, or what `g_idx` [parts, in] says.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samovar.errors import CheckpointError
from samovar.kernels.op import Kernels
from samovar.quant.base import TensorSpec
from samovar.quant.stored import Stored

DUMMY_SCALE, DUMMY_EXPONENT = 2.0**-6, 127 - 6
"""Scales of made-up weights, as numbers and as UE8M0."""


class Grouped(Stored):
    """Subclasses give the small numbers. `group_size` -1 is one group for all input features."""

    def __init__(
        self, names: Sequence[str], tensors: Sequence[TensorSpec], kernels: Kernels, *, group_size: int = -1
    ) -> None:
        super().__init__(names, tensors, kernels)
        self.group_size = group_size

    def numbers(self, weights: dict[str, torch.Tensor], first: int, count: int) -> torch.Tensor:
        """The small numbers of some rows, float32 [count, in], in memory of their own."""
        raise NotImplementedError(f"{type(self).__name__} has no numbers")

    def scales(self, weights: dict[str, torch.Tensor], first: int, count: int, part: int) -> torch.Tensor:
        """The scales of some rows, float32 [count, groups]."""
        return weights["scale"][first : first + count].float()

    def rows(self, weights: dict[str, torch.Tensor], first: int, count: int, part: int) -> torch.Tensor:
        """See `Stored`."""
        values = self.numbers(weights, first, count)
        order = weights["g_idx"][part].long() if "g_idx" in weights else None
        if "zero" in weights:
            values -= self.spread(weights["zero"][first : first + count].float(), order)
        values *= self.spread(self.scales(weights, first, count, part), order)
        return values

    def dummy(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """See `QuantMethod`. Scales are small and positive, groups in order."""
        if name.endswith("g_idx"):
            return torch.arange(len(like)) // (len(like) if self.group_size == -1 else self.group_size)
        if "scale" not in name and name != "SCB":
            return None
        return torch.full(like.shape, DUMMY_EXPONENT if like.dtype is torch.uint8 else DUMMY_SCALE, device=like.device)

    def spread(self, groups: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
        """[rows, groups] -> one for each input feature, or [rows, 1]."""
        if order is not None:
            return groups[:, order]
        if groups.shape[1] == 1:
            return groups
        return groups.repeat_interleave(self.group_size, 1)[:, : self.num_inputs]

    def ordered(self, g_idx: torch.Tensor, num_groups: int) -> torch.Tensor | None:
        """`g_idx` [in] of every part as [parts, in]; None if it only says what `group_size` says already.

        A rank of a split layer has groups from the middle. Raises `CheckpointError` for groups that are not there.
        """
        order = g_idx.view(len(self.part_rows), self.num_inputs)
        if self.group_size == -1:
            plain = torch.zeros_like(order)
        else:
            plain = (
                (torch.arange(self.num_inputs, device=order.device) // self.group_size).to(order.dtype).expand_as(order)
            )
        if bool((order - order[:, :1] == plain).all()):
            return None
        low, high = int(order.min()), int(order.max())
        if low < 0 or high >= num_groups:
            raise CheckpointError(
                f"{self.names[0]}.g_idx names group {high if high >= num_groups else low}, but only {num_groups} are "
                "here: act-order of a layer that is split over its inputs needs --tensor-parallel-size 1"
            )
        return order.contiguous()

    def column(self, values: torch.Tensor) -> torch.Tensor:
        """Scales as a checkpoint has them -> [out, groups]: one a part, one a row, or as many as there are groups."""
        rows = sum(self.part_rows)
        if values.dim() == 1 and len(values) == len(self.part_rows) != rows:
            values = torch.cat([v.expand(rows) for v, rows in zip(values, self.part_rows, strict=True)])
        return values.view(rows, -1)


def unsigned(values: torch.Tensor) -> torch.Tensor:
    """Zero points [groups, out] -> [out, groups], one a byte."""
    return values.t().to(torch.uint8).contiguous()


def transposed(scales: torch.Tensor) -> torch.Tensor:
    """Scales [groups, out] -> [out, groups], in the smallest type that holds them."""
    return narrowed(scales.t().contiguous())


def narrowed(values: torch.Tensor) -> torch.Tensor:
    """Scales in the smallest float type that holds every one of them exactly."""
    for dtype in (torch.float16, torch.bfloat16):
        small = values.to(dtype)
        if bool((small.float() == values).all()):
            return small
    return values
