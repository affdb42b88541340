"""NVFP4: E2M1 numbers, two to a byte, a UE4M3 scale for 16 of them, and a float32 scale for the whole tensor.

ModelOpt multiplies by the tensor's scale; compressed-tensors stores its reciprocal and divides. Activations are not
rounded: where the hardware multiplies no E2M1 numbers, that would cost exactness and bring nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samovar.kernels.coded_weights import pack_codes, pack_small_scale, small_scale
from samovar.quant.base import Dim, TensorSpec
from samovar.quant.coding import CODES, ROW_SCALE, SCALE
from samovar.quant.dims import PER_PART, grouped
from samovar.quant.grouped import Grouped
from samovar.quant.numbers.packing import unpack_pairs
from samovar.quant.numbers.small_floats import decode_e2m1, decode_e4m3
from samovar.quant.scheme import Layer

GROUP_SIZE = 16


@dataclass(frozen=True, slots=True)
class NVFP4Scheme:
    """How the tensors are called, and which of the two dialects they speak."""

    weight: str
    tensor_scale: str
    divides: bool
    input_scale: str
    has_input_scale: bool = True

    def method(self, layer: Layer) -> NVFP4:
        """See `Scheme`."""
        return NVFP4(self, layer)


COMPRESSED_TENSORS = NVFP4Scheme("weight_packed", "weight_global_scale", True, "input_global_scale")
MODELOPT = NVFP4Scheme("weight", "weight_scale_2", False, "input_scale")


class NVFP4(Grouped):
    """Everything stays as it is stored, but that the tensor's scale is held for each row."""

    def __init__(self, scheme: NVFP4Scheme, layer: Layer) -> None:
        self.scheme = scheme
        tensors = [
            TensorSpec(scheme.weight, torch.uint8, (Dim("out"), Dim("in", 2))),
            TensorSpec("weight_scale", torch.float8_e4m3fn, (Dim("out"), grouped(GROUP_SIZE))),
            TensorSpec(scheme.tensor_scale, torch.float32, PER_PART),
        ]
        if layer.has(scheme.input_scale, otherwise=scheme.has_input_scale):
            tensors.append(TensorSpec(scheme.input_scale, torch.float32, PER_PART))
        super().__init__(layer.names, tensors, layer.kernels, group_size=GROUP_SIZE)

    def repack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Stored`."""
        kept = {
            **weights,
            "scale": weights["weight_scale"],
            "tensor_scale": self.column(weights[self.scheme.tensor_scale]),
        }
        del kept["weight_scale"], kept[self.scheme.tensor_scale]
        return kept

    def kind(self) -> str:
        """See `Stored`."""
        return "e2m1_16"

    def coded(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Stored`. Signs of scales move to the codes, and codes of groups that are zero become zeros."""
        codes, scale = unpack_pairs(weights[self.scheme.weight]), weights["scale"]
        groups, bits = codes.view(len(codes), -1, GROUP_SIZE), scale.view(torch.uint8).unsqueeze(-1)
        groups ^= (bits >> 7) << 3
        groups *= (bits & 0x7F) != 0
        whole = weights["tensor_scale"][:, 0].float()
        small = small_scale((bits & 0x7F).squeeze(-1).view(torch.float8_e4m3fn))
        return {
            CODES: pack_codes(codes, "e2m1_16"),
            SCALE: pack_small_scale(small),
            ROW_SCALE: (1 / whole if self.scheme.divides else whole).contiguous(),
        }

    def numbers(self, weights: dict[str, torch.Tensor], first: int, count: int) -> torch.Tensor:
        """See `Grouped`."""
        return decode_e2m1(unpack_pairs(weights[self.scheme.weight][first : first + count]))

    def scales(self, weights: dict[str, torch.Tensor], first: int, count: int, part: int) -> torch.Tensor:
        """See `Grouped`."""
        scale, whole = (weights[name][first : first + count] for name in ("scale", "tensor_scale"))
        return decode_e4m3(scale) / whole if self.scheme.divides else decode_e4m3(scale) * whole
