"""Groups of inputs that share a scale, and which scale suits each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def or_one(scale: torch.Tensor) -> torch.Tensor:
    """Scales, with one for those that are not positive."""
    return torch.where(scale > 0, scale, 1.0)


def in_groups(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """[rows, in] -> [rows, groups, group_size]."""
    return weight.reshape(len(weight), weight.shape[1] // group_size, group_size)


def nearest_scale(
    groups: torch.Tensor, scales: Sequence[torch.Tensor], meant: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Of each group, the scale with which it is `meant` to be nearest to what it is; the first of equals."""

    def error(scale: torch.Tensor) -> torch.Tensor:
        return (meant(scale) - groups).square_().sum(-1, keepdim=True)

    best, least = scales[0], error(scales[0])
    for other in scales[1:]:
        attempt = error(other)
        # float8 has no `where` of its own: bits do.
        bits = torch.where(attempt < least, _bits(other), _bits(best))
        best, least = bits.view(best.dtype), torch.minimum(attempt, least)
    return best


def _bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.int16 if scale.itemsize == 2 else torch.uint8)
