"""Matrices -> small numbers and scales, for quantization at load time. Scales are rounded first, then the numbers to them.

Where a block has several sensible scales, the one with the smallest sum of squared errors is taken, the first of equals.
Blocks of nothing but zeros get zeros, whatever their scale. All take and give rows: [rows, in].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from samovar.quant.numbers.small_floats import (
    E2M1_MAX,
    E4M3_MAX,
    decode_e2m1,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue4m3,
    encode_ue8m0,
)

Coded = tuple[torch.Tensor, torch.Tensor]
"""Codes, one an element, and scales [rows, groups]."""

INT8_MAX = 127.0
INT4_RANGES = (1.0, 0.95, 0.9, 0.85)
"""Parts of a group's range that four-bit integers may be spread over; the rest saturates."""
HALF_MIN, HALF_MAX = 2.0**-24, 65504.0


def int8_rows(weight: torch.Tensor) -> Coded:
    """int8 from -127 to 127 with one float32 scale a row."""
    scale = _or_one(weight.abs().amax(1, keepdim=True) / INT8_MAX)
    return (weight / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def fp8_rows(weight: torch.Tensor) -> Coded:
    """e4m3 with one float32 scale a row."""
    scale = _or_one(weight.abs().amax(1, keepdim=True) / E4M3_MAX)
    return encode_e4m3(weight / scale), scale


def int4_groups(weight: torch.Tensor, group_size: int) -> Coded:
    """Unsigned codes with eight in the middle and a float16 scale a group; the scale's sign lets the largest be -8."""
    groups = _groups(weight, group_size)
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    tried = []
    for part in INT4_RANGES:
        size = (largest.abs() * part / 8).clamp(HALF_MIN, HALF_MAX)
        scale = torch.where(largest > 0, -size, size).half()
        codes = ((groups / scale.float()).round().clamp(-8, 7) + 8).to(torch.uint8)
        tried.append((codes, scale))
    codes, scale = _best(groups, tried, lambda codes, scale: (codes.float() - 8) * scale.float())
    return codes.view(weight.shape), scale.squeeze(-1)


def nvfp4_scale(weight: torch.Tensor) -> torch.Tensor:
    """The scale of a whole tensor: its largest number becomes the largest E2M1 times the largest E4M3."""
    return _or_one(weight.abs().amax() / (E2M1_MAX * E4M3_MAX))


def nvfp4_groups(weight: torch.Tensor, tensor_scale: torch.Tensor, group_size: int) -> Coded:
    """E2M1 with an e4m3 scale a group, that multiplies `tensor_scale`; a group's largest becomes six, or four."""
    groups = _groups(weight, group_size)
    largest = groups.abs().amax(-1, keepdim=True)
    tried = []
    for target in (E2M1_MAX, 4.0):
        scale = encode_ue4m3(largest / target / tensor_scale)
        tried.append((encode_e2m1(groups / _or_one(scale.float() * tensor_scale)), scale))
    codes, scale = _best(groups, tried, lambda codes, scale: decode_e2m1(codes) * (scale.float() * tensor_scale))
    return codes.view(weight.shape), scale.squeeze(-1)


def mxfp4_groups(weight: torch.Tensor, group_size: int) -> Coded:
    """E2M1 with a UE8M0 scale a group: the power of two below a quarter of the group's largest, or the next one."""
    groups = _groups(weight, group_size)
    below = encode_ue8m0(groups.abs().amax(-1, keepdim=True) / 4, "down")
    tried = []
    for scale in (below, (below.int() + 1).clamp(max=254).to(torch.uint8)):
        tried.append((encode_e2m1(groups / decode_ue8m0(scale)), scale))
    codes, scale = _best(groups, tried, lambda codes, scale: decode_e2m1(codes) * decode_ue8m0(scale))
    return codes.view(weight.shape), scale.squeeze(-1)


def _or_one(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale > 0, scale, 1.0)


def _groups(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    return weight.reshape(len(weight), weight.shape[1] // group_size, group_size)


def _best(
    groups: torch.Tensor, tried: Sequence[Coded], decode: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> Coded:
    """Of each group, the attempt that is nearest to it."""
    codes, scale = tried[0]
    least = (decode(codes, scale) - groups).square().sum(-1, keepdim=True)
    for other_codes, other_scale in tried[1:]:
        error = (decode(other_codes, other_scale) - groups).square().sum(-1, keepdim=True)
        codes = torch.where(error < least, other_codes, codes)
        # float8 has no `where` of its own: bytes do.
        bits = torch.where(error < least, _bits(other_scale), _bits(scale))
        scale, least = bits.view(scale.dtype), torch.minimum(error, least)
    return codes, scale


def _bits(scale: torch.Tensor) -> torch.Tensor:
    return scale.view(torch.int16 if scale.itemsize == 2 else torch.uint8)
