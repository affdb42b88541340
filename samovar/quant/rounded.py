"""Rounded: linears of which the activations are rounded too, by a scale of the checkpoint's or by their own.

On a GPU small numbers are multiplied with small numbers (`scaled`), where the ops know the scales; elsewhere both sides
are dequantized.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from samovar.kernels.op import Kernels
from samovar.kernels.scaled_linear import BLOCK
from samovar.quant.base import TensorSpec
from samovar.quant.dims import PER_PART
from samovar.quant.inputs import Inputs, round_inputs
from samovar.quant.on_units import OnUnits
from samovar.quant.scaled import ScaledProducts, ScaledWeight
from samovar.quant.scheme import Layer


def input_tensors(inputs: Inputs | None, layer: Layer, name: str = "input_scale") -> list[TensorSpec]:
    """What checkpoints store for `inputs`: scales that are there are read, also where they are not used."""
    is_static = inputs is not None and not inputs.is_dynamic
    found = [TensorSpec(name, torch.float32, PER_PART)] if layer.has(name, otherwise=is_static) else []
    zero = name.replace("scale", "zero_point")
    if inputs is not None and is_static and not inputs.is_symmetric:
        found.append(TensorSpec(zero, torch.int8, PER_PART))
    return found


class Rounded(OnUnits):
    """The tensors of `input_tensors` are called `input_scale` and `input_zero_point`, or as `input_name` says.

    Where `is_small`, ops multiply what `small` gives, on devices that have them.
    """

    def __init__(
        self,
        names: Sequence[str],
        tensors: Sequence[TensorSpec],
        kernels: Kernels,
        *,
        inputs: Inputs | None,
        group_size: int = -1,
        input_name: str = "input_scale",
        is_small: bool = False,
    ) -> None:
        super().__init__(names, tensors, kernels, group_size=group_size)
        self.inputs, self.input_name = inputs, input_name
        self.products = ScaledProducts(kernels) if is_small and kernels.target.device == "cuda" else None

    def small(self, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Codes and scale as in `ScaledWeight`; None for weights that have more to them."""
        return None

    def given(self, x: torch.Tensor, weights: dict[str, torch.Tensor], part: int) -> torch.Tensor:
        """See `Stored`."""
        if self.inputs is None:
            return x
        if self.inputs.is_dynamic:
            return round_inputs(x, self.inputs)
        zero = weights.get(self.input_name.replace("scale", "zero_point"))
        shift = None if zero is None else zero[part].float()
        return round_inputs(x, self.inputs, weights[self.input_name][part], shift)

    def after_load(self, weights: dict[str, torch.Tensor], part_rows: list[int]) -> dict[str, torch.Tensor]:
        """See `QuantMethod`. Where all parts round their inputs alike, as they should, one scale is kept for them."""
        kept = super().after_load(weights, part_rows)
        scale = kept.get(self.input_name)
        if self.products is not None and scale is not None and bool((scale == scale[0]).all()):
            kept[self.input_name] = scale[:1].clone()
        return kept

    def scaled(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> ScaledWeight | None:
        """The weight for the ops; None where they cannot be used."""
        found = None if self.products is None or self.inputs is None else self.small(weights)
        if found is None or (found[1].dim() == 2 and not self._has_whole_blocks(x)):
            return None
        is_static = self.inputs is not None and not self.inputs.is_dynamic
        return ScaledWeight(*found, weights[self.input_name] if is_static else None)

    def _has_whole_blocks(self, x: torch.Tensor) -> bool:
        """Blocks are counted from the first row of a part in checkpoints, and from the first row of all in the ops."""
        return x.shape[1] % BLOCK == 0 and not any(rows % BLOCK for rows in self.part_rows[:-1])
