"""A format says which tensors a Linear stores, how they are packed and how to multiply by them. Nothing else.

It never sees tensor parallelism, fused parts, q/k/v heads, experts or file names: those belong to the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch.nn.functional import embedding

from samovar.kernels.logits import logits
from samovar.kernels.op import Kernels
from samovar.kernels.rms_norm import rms_norm
from samovar.quant.checks import Check, Use
from samovar.quant.specs import GATED, Activation, Dim, FeatureAxis, TensorSpec, Weights

__all__ = ["GATED", "Activation", "Dim", "FeatureAxis", "QuantMethod", "TensorSpec", "Weights"]


class QuantMethod:
    """A weight format. Subclasses set `tensors` and implement `multiply`.

    The products joined with what comes before or after them are compositions of `multiply`; a format overrides those
    that it has a kernel for.
    """

    tensors: tuple[TensorSpec, ...]
    holds_tables: ClassVar[bool] = False
    """Also for embeddings and heads; where not, those are plain."""
    may_store_zero_bias: ClassVar[bool] = False
    """Whether checkpoints have a bias of zeros for linears without one."""
    note: str = ""
    """What people should know about how it is multiplied."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels

    def of_parts(self, names: Sequence[str]) -> QuantMethod:
        """The format of one layer, which joins the checkpoint's linears `names` (each the name of its weight)."""
        return self

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> Weights:
        """Unfilled memory for `specs`, on a rank that holds `features`, of which each part has `part_rows` outputs."""
        return {spec.name: empty(*spec.shape(features), dtype=spec.dtype) for spec in specs}

    def part_of(self, weights: Weights, spec: TensorSpec, part: int, first_row: int, rows: int) -> torch.Tensor:
        """Where `spec` of one part is, which has the outputs from `first_row` on: a view of what was allocated."""
        target = weights[spec.name]
        for index, dim in enumerate(spec.dims):
            if dim.axis == "out":
                target = target.narrow(index, first_row // dim.per, rows // dim.per)
            elif dim.axis == "part":
                target = target.narrow(index, part, 1)
        return target

    def tensors_of(self, part: int) -> tuple[TensorSpec, ...]:
        """What the checkpoint stores for one part of a layer that joins several."""
        return self.tensors

    def dummy(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """Values for a tensor whose name in the checkpoint ends in `name`, where not any numbers will do."""
        return None

    def resident_bytes(self, weights: Weights, part_rows: Sequence[int]) -> int:
        """What `weights`, as allocated, will take once `after_load` is over."""
        return sum(tensor.nbytes for tensor in weights.values())

    def multiply(self, x: torch.Tensor, weights: Weights, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x [tokens, in] times the stored weight, plus bias -> [tokens, out]."""
        raise NotImplementedError(f"{type(self).__name__} has no multiply")

    def add_multiply(
        self, x: torch.Tensor, weights: Weights, residual: torch.Tensor, bias: torch.Tensor | None = None
    ) -> None:
        """residual [tokens, out] += `multiply(x)`, in place."""
        residual.add_(self.multiply(x, weights, bias))

    def norm_multiply(
        self, x: torch.Tensor, norm_weight: torch.Tensor, eps: float, weights: Weights, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`multiply` of the RMS norm of x [tokens, in]; norm_weight [in] is of x's dtype or float32."""
        return self.multiply(self.kernels.use(rms_norm)(x, norm_weight, eps), weights, bias)

    def norm_gated_multiply(
        self,
        x: torch.Tensor,
        norm_weight: torch.Tensor,
        eps: float,
        weights: Weights,
        activation: Activation,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """activation(gate) * up -> [tokens, out / 2], where `norm_multiply` gives gate then up; `activation` is a key
        of `GATED`."""
        return self.kernels.use(GATED[activation])(self.norm_multiply(x, norm_weight, eps, weights, bias))

    def checks(self, weights: Weights, use: Use) -> list[Check]:
        """Products of what was loaded, for the self-test of a start; without memory, what they will run."""
        return []

    def look_up(self, token_ids: torch.Tensor, weights: Weights) -> torch.Tensor:
        """Rows [tokens, in] of the stored weight, for formats that hold tables."""
        return embedding(token_ids, weights["weight"])

    def logits(self, x: torch.Tensor, weights: Weights) -> torch.Tensor:
        """`multiply` without a bias in float32, for formats that hold tables."""
        return self.kernels.use(logits)(x, weights["weight"])

    def after_load(self, weights: Weights, part_rows: list[int]) -> Weights:
        """Repack what was loaded for the kernel. `part_rows` are the output features of each fused part held here."""
        return weights
