"""Rows of keys and values as a cache stores them, in plain torch: what every kernel that writes or reads them follows.

How a row is stored follows from the tensors of the cache alone, which are (keys, values) or (keys, values, key scales,
value scales):

- floats of 16 or 32 bits are the numbers themselves;
- floats of 8 bits are the numbers divided by a scale, one for each head ([kv_heads]) or none, rounded to the nearest and
  bounded by the largest there is: no key becomes infinite;
- int8 has a scale for each row ([.., kv_heads]), its largest magnitude / 127;
- uint8 holds codes of 4, 3 or 2 bits, as many as there are bytes, with a scale for each row: a code c of b bits stands for
  `level(c - (2^b - 1) / 2)`, levels of a quantizer for normal numbers, which rotated rows are close to (TurboQuant,
  Zandieh et al. 2025). The bit that TurboQuant spends on the sign of the rest makes products unbiased; here the scale does,
  by |x|^2 / <x, levels>, and the bit halves the error instead.

Codes of 4 and of 2 bits lie in order, the first in the lowest bits of a byte. Of 3 bits, the two lower ones come first, as
those of 2 bits do, then the highest ones, eight to a byte.
"""

from __future__ import annotations

import torch

TERMS: dict[int, tuple[float, float, float]] = {
    4: (0.26416563, 1.0455401e-4, 2.971392e-5),
    3: (0.4721897, 0.011551009, 0.0),
    2: (0.892933, 0.050667, 0.0),
}
"""By bits: level(u) = u (t0 + t1 u^2 + t2 u^4). Fitted to the least mean square error for normal numbers, which is within
0.3 % of that of free levels (Max 1960, Lloyd 1982): 0.0095, 0.0346, 0.1175."""
LARGEST_SCALE = 65504.0


def level(u: torch.Tensor, bits: int) -> torch.Tensor:
    """The numbers that codes stand for; u [..] counts from the middle between the two smallest."""
    first, second, third = TERMS[bits]
    square = u * u
    return u * (first + square * (second + square * third))


def thresholds(bits: int) -> torch.Tensor:
    """Between neighbouring levels, those above 0 in order."""
    levels = level(torch.arange(1 << (bits - 1)) + 0.5, bits)
    return (levels[1:] + levels[:-1]) / 2


def bits_of(codes: torch.Tensor, head_dim: int) -> int:
    """Bits of a number in rows [.., size] of a cache."""
    return codes.shape[-1] * codes.itemsize * 8 // head_dim


def encode(
    x: torch.Tensor, like: torch.Tensor, scales: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows x [n, kv_heads, head_dim] as a cache tensor `like` with `scales` holds them.

    Returns (codes [n, kv_heads, size] of like's dtype, scales of the rows [n, kv_heads] if each has its own).
    """
    if like.dtype == torch.int8:
        x = x.float()
        scale = x.abs().amax(-1) / 127
        usable = (scale > 0) & scale.isfinite()
        codes = (x / scale.where(usable, 1.0)[..., None]).round()
        return codes.where(usable[..., None], 0.0).to(torch.int8), scale
    if like.dtype == torch.uint8:
        return _quantize(x.float(), bits_of(like, x.shape[-1]))
    if like.itemsize == 1:
        bound = torch.finfo(like.dtype).max
        x = x.float() if scales is None else x.float() / scales[:, None]
        return x.clamp(-bound, bound).to(like.dtype), None
    return x.to(like.dtype), None


def _quantize(x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes and scales of rotated rows."""
    half, square = 1 << (bits - 1), x.square().sum(-1, keepdim=True)
    unit = x / (square / x.shape[-1]).sqrt().where(square > 0, 1.0)
    index = torch.bucketize(unit.abs(), thresholds(bits).to(x.device))
    codes = torch.where(unit >= 0, half + index, half - 1 - index)
    levels = level(codes - (half - 0.5), bits)
    scale = (square / (x * levels).sum(-1, keepdim=True)).where(square > 0, 0.0).clamp(max=LARGEST_SCALE)
    return pack(codes.to(torch.uint8), bits), scale[..., 0]


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [.., head_dim], one to a byte, as rows of a cache hold them."""
    if bits == 3:
        return torch.cat((pack(codes & 3, 2), pack(codes >> 2, 1)), -1)
    parts = codes.reshape(*codes.shape[:-1], -1, 8 // bits)
    shifts = torch.arange(0, 8, bits, device=codes.device, dtype=torch.uint8)
    packed: torch.Tensor = (parts << shifts).sum(-1, dtype=torch.uint8)
    return packed


def unpack(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """The reverse of `pack`."""
    if bits == 3:
        third = packed.shape[-1] // 3
        low, high = packed[..., : 2 * third], packed[..., 2 * third :]
        return unpack(low, 2) | unpack(high, 1) << 2
    shifts = torch.arange(0, 8, bits, device=packed.device, dtype=torch.uint8)
    return (packed[..., None] >> shifts & (1 << bits) - 1).flatten(-2)


def decode(codes: torch.Tensor, scales: torch.Tensor | None, head_dim: int) -> torch.Tensor:
    """Numbers [.., kv_heads, head_dim] in float32 from codes [.., kv_heads, size] and scales: of their rows, of heads, or
    none."""
    if codes.dtype == torch.uint8:
        bits = bits_of(codes, head_dim)
        x = level(unpack(codes, bits) - ((1 << bits) - 1) / 2, bits)
    else:
        x = codes.float()
    return x if scales is None else x * scales.float()[..., None]


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """The same memory in a type that torch indexes everywhere."""
    return cache.view(torch.uint8) if cache.itemsize == 1 else cache


def rows_at(
    cache: tuple[torch.Tensor, ...], which: int, blocks: torch.Tensor, offsets: torch.Tensor, head_dim: int
) -> torch.Tensor:
    """Keys (`which` 0) or values (1) of the slots (blocks, offsets), [.., kv_heads, head_dim] in float32."""
    codes = as_bytes(cache[which])[blocks, offsets].view(cache[which].dtype)
    scales = cache[2 + which] if len(cache) > 2 else None
    if scales is not None and scales.dim() > 1:
        scales = scales[blocks, offsets]
    return decode(codes, scales, head_dim)
