"""FP8: weights in e4m3, with a scale for a tensor, a row, a group of inputs (a power of two in MXFP8) or a block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from samovar.quant.base import Dim, TensorSpec
from samovar.quant.coding import kind_of_bytes, packed_bytes
from samovar.quant.dims import PER_PART, Along, fixed, grouped
from samovar.quant.inputs import Inputs
from samovar.quant.numbers.small_floats import decode_e4m3, decode_ue8m0
from samovar.quant.rounded import Rounded, input_tensors
from samovar.quant.scaled import fits
from samovar.quant.scheme import Layer

Strategy = Literal["tensor", "row", "column", "group", "block"]


@dataclass(frozen=True, slots=True)
class FP8Scheme:
    """`strategy` as in `IntScheme`, or a scale for each block of `block` [rows, inputs], of which the last may be cut off.

    `scale` are names, of which the first that the checkpoint has is meant; `powers`: scales are bytes, UE8M0.
    """

    strategy: Strategy
    block: tuple[int, int] = (1, -1)
    weight: str = "weight"
    scale: tuple[str, ...] = ("weight_scale",)
    powers: bool = False
    inputs: Inputs | None = None
    input_scale: tuple[str, ...] = ("input_scale",)

    def method(self, layer: Layer) -> FP8:
        """See `Scheme`."""
        return FP8(self, layer)


class FP8(Rounded):
    """Weight and scales stay as they are stored."""

    def __init__(self, scheme: FP8Scheme, layer: Layer) -> None:
        self.scheme, self.name = scheme, layer.one_of(scheme.scale)
        rows, inputs = scheme.block
        dims = {
            "tensor": PER_PART,
            "row": (Dim("out"),),
            "column": (Dim("out"), fixed(1)),
            "group": (Dim("out"), grouped(inputs)),
            "block": (Along("out", rows, is_ragged=True), Along("in", inputs, is_ragged=True)),
        }[scheme.strategy]
        given = layer.one_of(scheme.input_scale)
        tensors = [
            TensorSpec(scheme.weight, torch.float8_e4m3fn),
            TensorSpec(self.name, torch.uint8 if scheme.powers else torch.float32, dims),
            *input_tensors(scheme.inputs, layer, given),
        ]
        block = scheme.block if scheme.strategy == "block" else None
        is_small = not scheme.powers and scheme.strategy != "group" and fits(scheme.inputs, "fp8", block)
        super().__init__(
            layer.names, tensors, layer.kernels, inputs=scheme.inputs, group_size=inputs, input_name=given,
            is_small=is_small,
        )  # fmt: skip

    def repack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Stored`."""
        scale = weights.pop(self.name)
        return {**weights, "scale": scale if self.scheme.strategy == "block" else self.column(scale)}

    def numbers(self, weights: dict[str, torch.Tensor], first: int, count: int) -> torch.Tensor:
        """See `Grouped`."""
        return decode_e4m3(weights[self.scheme.weight][first : first + count])

    def kind(self) -> str | None:
        """See `Stored`."""
        if self.inputs is not None:
            return None
        return kind_of_bytes(
            "e4m3", self.scheme.block[1] if self.scheme.strategy in ("group", "block") else -1, self.num_inputs
        )

    def coded(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """See `Stored`. Scales of blocks are made those of rows."""
        kind = self.kind()
        if kind is None:
            return None
        scale = torch.cat([self.scales(weights, first, count, part) for part, first, count in self.blocks()])
        return packed_bytes(kind, weights[self.scheme.weight].view(torch.uint8), scale)

    def small(self, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor] | None:
        """See `Rounded`."""
        codes, scale = weights[self.scheme.weight].view(torch.uint8), weights.get("scale")
        if self.scheme.strategy == "block":
            return codes, weights[self.name] if scale is None else scale
        # Weights that were never loaded have no values, and are asked for shapes alone.
        return codes, codes.new_empty(len(codes), dtype=torch.float32) if scale is None else scale.view(-1)

    def scales(self, weights: dict[str, torch.Tensor], first: int, count: int, part: int) -> torch.Tensor:
        """See `Grouped`. Blocks are counted from the first row of each part."""
        scale = weights["scale"]
        if self.scheme.strategy != "block":
            found = scale[first : first + count]
        else:
            size = self.scheme.block[0]
            start = first - sum(self.part_rows[:part])
            above = sum(-(-rows // size) for rows in self.part_rows[:part])
            blocks = scale[above + start // size : above + -(-(start + count) // size)]
            found = blocks.repeat_interleave(size, 0)[start % size :][:count]
        return decode_ue8m0(found) if self.scheme.powers else found.float()
