"""Floats of four and eight bits: E2M1, E4M3FN, E5M2, and the scales UE4M3 and UE8M0.

Encoding rounds to the nearest, ties to the even code, and saturates: what is too large becomes the largest finite number.
NaN stays NaN where the format has one; in E2M1, which has none, it becomes the largest number, as in NVIDIA's conversion.
"""

from __future__ import annotations

from functools import cache
from typing import Literal

import torch

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""What the sixteen codes of E2M1 mean."""
E2M1_MAX, E4M3_MAX, E5M2_MAX = 6.0, 448.0, 57344.0

_E2M1_ABOVE = (0.25, 1.25, 2.5, 5.0)
"""Middles whose lower neighbour has an even code: only what is larger goes up."""
_E2M1_FROM = (0.75, 1.75, 3.5)
"""Middles whose upper neighbour has an even code: they go up themselves."""
_E8M0_NAN = 255

Rounding = Literal["down", "nearest", "up"]


@cache
def table(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """`values` as float32 on a device, made once."""
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=torch.float32, device=device)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """Codes 0 to 15, one a byte -> float32."""
    return table(E2M1_VALUES, codes.device)[codes.int()]


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Numbers -> codes, one a byte. The sign of zero is kept."""
    size = x.float().abs()
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for middle in _E2M1_ABOVE:
        code += size > middle
    for middle in _E2M1_FROM:
        code += size >= middle
    code |= torch.signbit(x).to(torch.uint8) << 3
    return code.masked_fill_(x.isnan(), 7)


def round_e2m1(x: torch.Tensor) -> torch.Tensor:
    """`decode_e2m1(encode_e2m1(x))` of finite numbers, in fewer steps: they are multiples of 0.5, 1 or 2."""
    size = x.abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    return (x / step).round_().mul_(step).clamp_(-E2M1_MAX, E2M1_MAX)


def decode_e4m3(codes: torch.Tensor) -> torch.Tensor:
    """Bytes, or float8 tensors -> float32. Codes 127 and 255 are NaN; there is no infinity."""
    return codes.view(torch.float8_e4m3fn).float()


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """Numbers -> float8 e4m3fn."""
    return x.float().clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e5m2(codes: torch.Tensor) -> torch.Tensor:
    """Bytes, or float8 tensors -> float32."""
    return codes.view(torch.float8_e5m2).float()


def encode_e5m2(x: torch.Tensor) -> torch.Tensor:
    """Numbers -> float8 e5m2; infinities become the largest finite number."""
    return x.float().clamp(-E5M2_MAX, E5M2_MAX).to(torch.float8_e5m2)


def encode_ue4m3(x: torch.Tensor) -> torch.Tensor:
    """Scales -> float8 e4m3fn without a sign; what is negative becomes zero."""
    return x.float().clamp(0.0, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """Bytes -> float32 powers of two, 2 ** (code - 127); code 255 is NaN."""
    codes = codes.view(torch.uint8).int()
    bits = torch.where(codes == 0, 0x00400000, codes << 23)
    return torch.where(codes == _E8M0_NAN, 0x7FC00000, bits).view(torch.float32)


def encode_ue8m0(x: torch.Tensor, rounding: Rounding = "nearest") -> torch.Tensor:
    """Scales -> bytes. Nearest is by value: from 1.5 times a power of two on it is the next one.

    What is not positive becomes the smallest power, 2 ** -127; what is too large, infinity too, the largest, 2 ** 127.
    """
    x = x.float()
    mantissa, exponent = torch.frexp(x.clamp(2.0**-127, 2.0**127))
    code = exponent + 126  # x is 2 * mantissa times 2 ** (code - 127), with mantissa from a half up
    least = {"down": 1.0, "nearest": 0.75, "up": 0.5}[rounding]
    code = code + (mantissa > least if rounding == "up" else mantissa >= least).int()
    return torch.where(x.isnan(), _E8M0_NAN, code.clamp(0, 254)).to(torch.uint8)
