"""MXFP4: E2M1 numbers, two to a byte, and a power of two for 32 of them (OCP microscaling formats)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samovar.kernels.coded_weights import KINDS, pack_codes, pack_scale
from samovar.quant.base import Dim, TensorSpec
from samovar.quant.coding import CODES, ROW_SCALE, SCALE
from samovar.quant.dims import fixed, grouped
from samovar.quant.grouped import Grouped
from samovar.quant.numbers.packing import unpack_pairs
from samovar.quant.numbers.small_floats import decode_e2m1, decode_ue8m0
from samovar.quant.scheme import Layer

GROUP_SIZE = 32
NAN = 255
"""The scale that is no number."""


@dataclass(frozen=True, slots=True)
class MXFP4Scheme:
    """How the tensors are called. `in_blocks`: the bytes of a group stand on an axis of their own, as in gpt-oss."""

    weight: str
    scale: str
    in_blocks: bool = False

    def method(self, layer: Layer) -> MXFP4:
        """See `Scheme`."""
        return MXFP4(self, layer)


COMPRESSED_TENSORS = MXFP4Scheme("weight_packed", "weight_scale")
QUARK = MXFP4Scheme("weight", "weight_scale")
GPT_OSS = MXFP4Scheme("weight_blocks", "weight_scales", in_blocks=True)


class MXFP4(Grouped):
    """Weight and scales stay as they are stored."""

    def __init__(self, scheme: MXFP4Scheme, layer: Layer) -> None:
        self.scheme = scheme
        flat = (Dim("out"), Dim("in", 2))
        blocks = (Dim("out"), grouped(GROUP_SIZE), fixed(GROUP_SIZE // 2))
        tensors = (
            TensorSpec(scheme.weight, torch.uint8, blocks if scheme.in_blocks else flat),
            TensorSpec(scheme.scale, torch.uint8, (Dim("out"), grouped(GROUP_SIZE))),
        )
        super().__init__(layer.names, tensors, layer.kernels, group_size=GROUP_SIZE)

    def repack(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Stored`."""
        return {**weights, "scale": weights.pop(self.scheme.scale)}

    def kind(self) -> str:
        """See `Stored`."""
        return "e2m1_32"

    def coded(self, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """See `Stored`. A row's largest scale becomes the row's; the others are what they are relative to it.

        A group 2 ** 251 times smaller than another of its row becomes larger than it is.
        """
        exponents = weights["scale"].int()
        largest = torch.where(exponents == NAN, 0, exponents).amax(1, keepdim=True)
        bits = (exponents - largest + 127 + KINDS["e2m1_32"].shift).clamp(min=1)
        scale = torch.where(exponents == NAN, torch.nan, (bits << 23).view(torch.float32))
        packed = weights[self.scheme.weight]
        codes = unpack_pairs(packed.reshape(len(packed), -1))
        return {
            CODES: pack_codes(codes, "e2m1_32"),
            SCALE: pack_scale(scale, "e2m1_32"),
            ROW_SCALE: decode_ue8m0(largest[:, 0].to(torch.uint8)),
        }

    def numbers(self, weights: dict[str, torch.Tensor], first: int, count: int) -> torch.Tensor:
        """See `Grouped`."""
        packed = weights[self.scheme.weight][first : first + count]
        return decode_e2m1(unpack_pairs(packed.reshape(count, -1)))

    def scales(self, weights: dict[str, torch.Tensor], first: int, count: int, part: int) -> torch.Tensor:
        """See `Grouped`."""
        return decode_ue8m0(weights["scale"][first : first + count])
