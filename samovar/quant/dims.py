"""Axes of stored tensors, beyond what `base.Dim` says: several entries for a few features, ragged ends, fixed lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from samovar.errors import CheckpointError, ConfigError
from samovar.quant.base import Dim, FeatureAxis, TensorSpec

_NO_AXIS = cast(FeatureAxis, "none")


@dataclass(frozen=True, slots=True)
class Along(Dim):
    """`entries` for every `per` features; where `is_ragged`, the last ones may stand for fewer features."""

    entries: int = 1
    is_ragged: bool = False


def fixed(entries: int) -> Dim:
    """An axis that runs along no features."""
    return Along(_NO_AXIS, entries=entries)


PER_PART = (Dim("part"),)
"""One number for each checkpoint tensor."""


def length(dim: Dim, features: dict[FeatureAxis, int], what: str) -> int:
    """Entries along `dim`; `CheckpointError` naming the tensor `what` if they do not divide the features."""
    entries = dim.entries if isinstance(dim, Along) else 1
    if dim.axis == _NO_AXIS:
        return entries
    size = features[dim.axis]
    if size % dim.per and not (isinstance(dim, Along) and dim.is_ragged):
        raise CheckpointError(
            f"{what} has one entry for every {dim.per} {dim.axis}put features, which do not divide {size} of them here; "
            f"on several devices use a --tensor-parallel-size that leaves a multiple of {dim.per}"
        )
    return -(-size // dim.per) * entries


def check_cut(spec: TensorSpec, axis: FeatureAxis, share: int, name: str) -> None:
    """Raise `ConfigError` where ranks that have `share` features of a linear each would cut what has one entry.

    Only a ragged end needs this: all others do not divide.
    """
    for dim in spec.dims:
        if dim.axis == axis and isinstance(dim, Along) and dim.is_ragged and share % dim.per:
            raise ConfigError(
                f"{name}.{spec.name} has one entry for every {dim.per} {axis}put features, and {share} of them on each "
                f"device cut one: use a --tensor-parallel-size that leaves a multiple of {dim.per}"
            )


@dataclass(frozen=True, slots=True)
class EachPart(TensorSpec):
    """A tensor that runs along no output features, and that every fused part has one of."""


def grouped(group_size: int) -> Dim:
    """Groups of input features; -1 stands for one group of them all."""
    return fixed(1) if group_size == -1 else Along("in", group_size)
