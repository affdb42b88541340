"""Matrices -> small numbers and scales, for quantization at load time. Scales are rounded first, then the numbers to them.

Where a block has several sensible scales, the one with the smallest sum of squared errors is taken, the first of equals.
Blocks of nothing but zeros get zeros, whatever their scale. All take and give rows: [rows, in].
"""

from __future__ import annotations

import torch

from samovar.quant.numbers.groups import in_groups, nearest_scale, or_one
from samovar.quant.numbers.small_floats import (
    E2M1_MAX,
    E4M3_MAX,
    decode_ue8m0,
    encode_e2m1,
    encode_e4m3,
    encode_ue4m3,
    encode_ue8m0,
    round_e2m1,
)

Coded = tuple[torch.Tensor, torch.Tensor]
"""Codes, one an element, and scales [rows, groups]."""

INT8_MAX = 127.0
INT4_RANGES = (1.0, 0.95, 0.9, 0.85)
"""Parts of a group's range that four-bit integers may be spread over; the rest saturates."""
HALF_MIN, HALF_MAX = 2.0**-24, 65504.0


def int8_rows(weight: torch.Tensor) -> Coded:
    """int8 from -127 to 127 with one float32 scale a row."""
    scale = or_one(weight.abs().amax(1, keepdim=True) / INT8_MAX)
    return (weight / scale).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scale


def int8_groups(weight: torch.Tensor, group_size: int) -> Coded:
    """int8 from -127 to 127 with one float16 scale a group."""
    groups = in_groups(weight, group_size)
    scale = (groups.abs().amax(-1, keepdim=True) / INT8_MAX).clamp(HALF_MIN, HALF_MAX).half()
    codes = (groups / scale.float()).round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
    return codes.view(weight.shape), scale.squeeze(-1)


def fp8_rows(weight: torch.Tensor) -> Coded:
    """e4m3 with one float32 scale a row."""
    scale = or_one(weight.abs().amax(1, keepdim=True) / E4M3_MAX)
    return encode_e4m3(weight / scale), scale


def int4_groups(weight: torch.Tensor, group_size: int) -> Coded:
    """Unsigned codes with eight in the middle and a float16 scale a group; the scale's sign lets the largest be -8."""
    groups = in_groups(weight, group_size)
    high, low = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    largest = torch.where(high > -low, high, low)
    scales = []
    for part in INT4_RANGES:
        size = (largest.abs() * part / 8).clamp(HALF_MIN, HALF_MAX)
        scales.append(torch.where(largest > 0, -size, size).half())

    def rounded(scale: torch.Tensor) -> torch.Tensor:
        return (groups / scale.float()).round_().clamp_(-8, 7)

    scale = nearest_scale(groups, scales, lambda scale: rounded(scale).mul_(scale.float()))
    return (rounded(scale) + 8).to(torch.uint8).view(weight.shape), scale.squeeze(-1)


def nvfp4_scale(weight: torch.Tensor) -> torch.Tensor:
    """The scale of a whole tensor: its largest number becomes the largest E2M1 times the largest E4M3."""
    return or_one(weight.abs().amax() / (E2M1_MAX * E4M3_MAX))


def nvfp4_groups(weight: torch.Tensor, tensor_scale: torch.Tensor, group_size: int) -> Coded:
    """E2M1 with an e4m3 scale a group, that multiplies `tensor_scale`; a group's largest becomes six, or four."""
    groups = in_groups(weight, group_size)
    largest = groups.abs().amax(-1, keepdim=True)
    scales = [encode_ue4m3(largest / target / tensor_scale) for target in (E2M1_MAX, 4.0)]

    def small(scale: torch.Tensor) -> torch.Tensor:
        return groups / or_one(scale.float() * tensor_scale)

    scale = nearest_scale(groups, scales, lambda scale: round_e2m1(small(scale)).mul_(scale.float() * tensor_scale))
    return encode_e2m1(small(scale)).view(weight.shape), scale.squeeze(-1)


def mxfp4_groups(weight: torch.Tensor, group_size: int) -> Coded:
    """E2M1 with a UE8M0 scale a group: the power of two below a quarter of the group's largest, or the next one."""
    groups = in_groups(weight, group_size)
    below = encode_ue8m0(groups.abs().amax(-1, keepdim=True) / 4, "down")
    scales = [below, (below.int() + 1).clamp(max=254).to(torch.uint8)]

    def small(scale: torch.Tensor) -> torch.Tensor:
        return groups / decode_ue8m0(scale)

    scale = nearest_scale(groups, scales, lambda scale: round_e2m1(small(scale)).mul_(decode_ue8m0(scale)))
    return encode_e2m1(small(scale)).view(weight.shape), scale.squeeze(-1)
