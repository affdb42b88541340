"""What `--quantization` may make of plain linears: for each name a scheme, and how a weight becomes what the scheme keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from samovar.quant.fp8 import FP8Scheme
from samovar.quant.inputs import Inputs
from samovar.quant.mxfp4 import COMPRESSED_TENSORS as MXFP4
from samovar.quant.numbers import encode
from samovar.quant.numbers.packing import pack, pack_pairs
from samovar.quant.nvfp4 import MODELOPT as NVFP4
from samovar.quant.packed_int import PackedIntScheme
from samovar.quant.scheme import Scheme
from samovar.quant.whole_int import IntScheme

Kept = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class OnlineFormat:
    """`scheme` says how it is multiplied. `of_part` measures a whole part, and `encode` gives from some of its rows and
    that measure what the scheme's method keeps. Groups of `group_size` inputs must come out even."""

    scheme: Scheme
    encode: Callable[[torch.Tensor, torch.Tensor], Kept]
    group_size: int = 1
    of_part: Callable[[torch.Tensor], torch.Tensor] = lambda weight: weight.new_ones(())
    rounded: Scheme | None = None
    """The scheme that also rounds activations, for GPUs that multiply such numbers."""


def _int8(weight: torch.Tensor, _: torch.Tensor) -> Kept:
    codes, scale = encode.int8_rows(weight)
    return {"weight": codes, "scale": scale}


def _fp8(weight: torch.Tensor, _: torch.Tensor) -> Kept:
    codes, scale = encode.fp8_rows(weight)
    return {"weight": codes, "scale": scale}


def _int4(weight: torch.Tensor, _: torch.Tensor) -> Kept:
    codes, scale = encode.int4_groups(weight, 32)
    return {"weight_packed": pack(codes, 4), "scale": scale}


def _nvfp4(weight: torch.Tensor, tensor_scale: torch.Tensor) -> Kept:
    codes, scale = encode.nvfp4_groups(weight, tensor_scale, 16)
    return {"weight": pack_pairs(codes), "scale": scale, "tensor_scale": tensor_scale.expand(len(weight), 1)}


def _mxfp4(weight: torch.Tensor, _: torch.Tensor) -> Kept:
    codes, scale = encode.mxfp4_groups(weight, 32)
    return {"weight_packed": pack_pairs(codes), "scale": scale}


FORMATS: dict[str, OnlineFormat] = {
    "fp8": OnlineFormat(FP8Scheme("column"), _fp8, rounded=FP8Scheme("column", inputs=Inputs("fp8"))),
    "int8": OnlineFormat(IntScheme("column"), _int8, rounded=IntScheme("column", inputs=Inputs("int8"))),
    "int4": OnlineFormat(PackedIntScheme(4, 32), _int4, 32),
    "nvfp4": OnlineFormat(NVFP4, _nvfp4, 16, lambda weight: encode.nvfp4_scale(weight.float())),
    "mxfp4": OnlineFormat(MXFP4, _mxfp4, 32),
}
"""What `--quantization` may say of a plain checkpoint. Activations are rounded for fp8 and int8 on GPUs that gain by it,
by the token."""
