"""What a format stores for a Linear: tensors, and which of its features run along their axes; and the gated activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from samovar.errors import ConfigError
from samovar.kernels.gelu_mul import gelu_mul
from samovar.kernels.op import Op
from samovar.kernels.silu_mul import silu_mul

Activation = Literal["silu", "gelu"]

GATED: dict[Activation, Op[[torch.Tensor], torch.Tensor]] = {"silu": silu_mul, "gelu": gelu_mul}
"""Gated activations by the name that `norm_gated_multiply` takes: the op on [tokens, gate then up]."""

FeatureAxis = Literal["out", "in", "part"]
Weights = dict[str, torch.Tensor]
"""A layer's tensors by the names that its format gives them."""


@dataclass(frozen=True, slots=True)
class Dim:
    """One axis of a stored tensor: an entry for every `per` features of the Linear's `axis`.

    `part` counts the checkpoint tensors that a fused Linear joins (one scale per tensor, for instance).
    """

    axis: FeatureAxis
    per: int = 1


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor that a format stores for a Linear; `name` is the suffix of its checkpoint name."""

    name: str
    dtype: torch.dtype
    dims: tuple[Dim, ...] = (Dim("out"), Dim("in"))

    def shape(self, features: dict[FeatureAxis, int]) -> tuple[int, ...]:
        """Shape on a rank that holds `features`; raises `ConfigError` if the packing does not divide."""
        for dim in self.dims:
            if features[dim.axis] % dim.per:
                raise ConfigError(
                    f"{self.name!r} packs {dim.per} {dim.axis} features per entry, but this rank holds "
                    f"{features[dim.axis]}: use a --tensor-parallel-size that leaves a multiple of {dim.per}"
                )
        return tuple(features[dim.axis] // dim.per for dim in self.dims)

    def index_of(self, axis: FeatureAxis) -> int | None:
        """Which axis of the stored tensor runs along `axis`; None if it has no such axis."""
        return next((i for i, dim in enumerate(self.dims) if dim.axis == axis), None)
