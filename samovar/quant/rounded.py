"""Rounded: linears of which the activations are rounded too, by a scale of the checkpoint's or by their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samovar.kernels.op import Kernels
from samovar.quant.base import TensorSpec
from samovar.quant.dims import PER_PART
from samovar.quant.grouped import Grouped
from samovar.quant.inputs import Inputs, round_inputs
from samovar.quant.scheme import Layer


def input_tensors(inputs: Inputs | None, layer: Layer, name: str = "input_scale") -> list[TensorSpec]:
    """What checkpoints store for `inputs`: scales that are there are read, also where they are not used."""
    is_static = inputs is not None and not inputs.is_dynamic
    found = [TensorSpec(name, torch.float32, PER_PART)] if layer.has(name, otherwise=is_static) else []
    zero = name.replace("scale", "zero_point")
    if inputs is not None and is_static and not inputs.is_symmetric:
        found.append(TensorSpec(zero, torch.int8, PER_PART))
    return found


class Rounded(Grouped):
    """The tensors of `input_tensors` are called `input_scale` and `input_zero_point`, or as `input_name` says."""

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[TensorSpec],
        kernels: Kernels,
        *,
        inputs: Inputs | None,
        group_size: int = -1,
        input_name: str = "input_scale",
    ) -> None:
        super().__init__(names, tensors, kernels, group_size=group_size)
        self.inputs, self.input_name = inputs, input_name

    def given(self, x: torch.Tensor, weights: dict[str, torch.Tensor], part: int) -> torch.Tensor:
        """See `Stored`."""
        if self.inputs is None:
            return x
        if self.inputs.is_dynamic:
            return round_inputs(x, self.inputs)
        zero = weights.get(self.input_name.replace("scale", "zero_point"))
        shift = None if zero is None else zero[part].float()
        return round_inputs(x, self.inputs, weights[self.input_name][part], shift)
