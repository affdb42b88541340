"""Products of one layer with rounded activations as kernels compute them: small numbers on both sides, scaled afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samovar.kernels.norm_gated_scaled_linear import norm_gated_scaled_linear
from samovar.kernels.norm_scaled_linear import norm_scaled_linear
from samovar.kernels.op import Kernels
from samovar.kernels.scaled_linear import BLOCK, dequantized, scaled_linear
from samovar.kernels.scaled_linear_add import scaled_linear_add
from samovar.quant.inputs import Inputs
from samovar.quant.specs import Activation


@dataclass(frozen=True, slots=True)
class ScaledWeight:
    """codes int8, or uint8 with the bits of e4m3, [out, in]; scale [out], or [out / 128, in / 128] rounded up; scales of
    the inputs [parts], if the checkpoint has them."""

    codes: torch.Tensor
    scale: torch.Tensor
    input_scale: torch.Tensor | None = None

    def rows(self, first: int, count: int) -> torch.Tensor:
        """Some rows of the weight, float32 [count, in]; of blocks, `first` must be a multiple of their size."""
        end = first + count
        scale = self.scale[first:end] if self.scale.dim() == 1 else self.scale[first // BLOCK : -(-end // BLOCK)]
        return dequantized(self.codes[first:end], scale)

    def part(self, index: int, rows: slice) -> ScaledWeight:
        """The rows of one part, with its own scale of the inputs."""
        assert self.input_scale is not None
        return ScaledWeight(self.codes[rows], self.scale[rows], self.input_scale[index])


def fits(inputs: Inputs | None, number: str, block: tuple[int, int] | None) -> bool:
    """Whether the ops round activations so; `block` are rows and inputs of a scale of the weight, None for whole rows."""
    if inputs is None or inputs.number != number or not inputs.is_symmetric:
        return False
    if block is not None:
        is_group = inputs.strategy == "group" and inputs.group_size == BLOCK
        return number == "fp8" and block == (BLOCK, BLOCK) and is_group and inputs.is_dynamic
    return inputs.strategy == "token" if inputs.is_dynamic else inputs.strategy == "tensor"


class ScaledProducts:
    """The ops, chosen once. `is_joined` is whether kernels do what comes before and after a product, too."""

    def __init__(self, kernels: Kernels) -> None:
        self.linear, self.dtype = kernels.use(scaled_linear), kernels.target.dtype
        self.is_joined = kernels.routes[scaled_linear.name].chosen.startswith("triton")
        if self.is_joined:
            self.linear_add, self.norm_linear = kernels.use(scaled_linear_add), kernels.use(norm_scaled_linear)
            self.norm_gated_linear = kernels.use(norm_gated_scaled_linear)

    def multiply(
        self, x: torch.Tensor, weight: ScaledWeight, part_rows: Sequence[int], bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [tokens, in] -> [tokens, out]. Parts whose inputs have different scales are multiplied one by one."""
        if weight.input_scale is None or len(weight.input_scale) == 1:
            return self.linear(x, weight.codes, weight.scale, weight.input_scale, bias)
        y, first = x.new_empty(len(x), len(weight.codes)), 0
        for index, count in enumerate(part_rows):
            rows = slice(first, first := first + count)
            one = weight.part(index, rows)
            y[:, rows] = self.linear(x, one.codes, one.scale, one.input_scale, None if bias is None else bias[rows])
        return y

    def joins(self, weight: ScaledWeight) -> bool:
        """Whether one product has all parts, so that others may be joined to it."""
        return self.is_joined and (weight.input_scale is None or len(weight.input_scale) == 1)

    def add(self, x: torch.Tensor, weight: ScaledWeight, residual: torch.Tensor, bias: torch.Tensor | None) -> None:
        """residual += the product."""
        self.linear_add(x, weight.codes, weight.scale, residual, weight.input_scale, bias)

    def norm(
        self, x: torch.Tensor, norm: tuple[torch.Tensor, float], weight: ScaledWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The product of the norm of x; `norm` is (weight, eps)."""
        return self.norm_linear(x, *norm, weight.codes, weight.scale, weight.input_scale, bias)

    def norm_gated(
        self,
        x: torch.Tensor,
        norm: tuple[torch.Tensor, float],
        weight: ScaledWeight,
        activation: Activation,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """activation(gate) * up of the product of the norm of x."""
        norm_weight, eps = norm
        return self.norm_gated_linear(
            x, norm_weight, eps, weight.codes, weight.scale, activation, weight.input_scale, bias
        )
