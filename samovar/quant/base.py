"""A format says which tensors a Linear stores, how they are packed and how to multiply by them. Nothing else.

It never sees tensor parallelism, fused parts, q/k/v heads, experts or file names: those belong to the layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from samovar.errors import ConfigError
from samovar.kernels.gelu_mul import gelu_mul
from samovar.kernels.op import Kernels, Op
from samovar.kernels.rms_norm import rms_norm
from samovar.kernels.silu_mul import silu_mul

Activation = Literal["silu", "gelu"]

GATED: dict[Activation, Op[[torch.Tensor], torch.Tensor]] = {"silu": silu_mul, "gelu": gelu_mul}
"""Gated activations by the name that `norm_gated_multiply` takes: the op on [tokens, gate then up]."""

FeatureAxis = Literal["out", "in", "part"]


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


class QuantMethod:
    """A weight format. Subclasses set `tensors` and implement `multiply`.

    The products joined with what comes before or after them are compositions of `multiply`; a format overrides those
    that it has a kernel for.
    """

    tensors: tuple[TensorSpec, ...]

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def multiply(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, in] times the stored weight, plus bias -> [tokens, out]."""
        raise NotImplementedError(f"{type(self).__name__} has no multiply")

    def add_multiply(
        self,
        x: torch.Tensor,
        weights: dict[str, torch.Tensor],
        residual: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> None:
        """residual [tokens, out] += `multiply(x)`, in place."""
        residual.add_(self.multiply(x, weights, bias))

    def norm_multiply(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weights: dict[str, torch.Tensor],
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`multiply` of the RMS norm of x [tokens, in]; norm_weight [in] is of x's dtype or float32."""
        return self.multiply(self.kernels.use(rms_norm)(x, norm_weight, eps), weights, bias)

    def norm_gated_multiply(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weights: dict[str, torch.Tensor],
        activation: Activation,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """activation(gate) * up -> [tokens, out / 2], where `norm_multiply` gives gate then up; `activation` is a key
        of `GATED`."""
        return self.kernels.use(GATED[activation])(self.norm_multiply(x, norm_weight, eps, weights, bias))

    def after_load(self, weights: dict[str, torch.Tensor], part_rows: list[int]) -> dict[str, torch.Tensor]:
        """Repack what was loaded for the kernel; the default keeps the checkpoint's layout.

        `part_rows` are the output features of each fused part held here, in order.
        """
        return weights
