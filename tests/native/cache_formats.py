"""The formats of the K/V cache, made by torch: bytes for the library, float64 numbers for references."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.native.abi import Format

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Bytes = NDArray[np.uint8]

TORCH = {
    Format.F32: torch.float32,
    Format.F16: torch.float16,
    Format.BF16: torch.bfloat16,
    Format.KV_FP8_E4M3: torch.float8_e4m3fn,
}
FORMATS = [*TORCH, Format.KV_I8]


def store(form: Format, x: Floats) -> Bytes:
    """x [..., head_dim] as the cache has it: [..., bytes of a row]."""
    if form is not Format.KV_I8:
        stored = torch.from_numpy(np.ascontiguousarray(x)).to(TORCH[form])
        return stored.view(torch.uint8).numpy().reshape(*x.shape[:-1], -1)
    most = np.abs(x).max(axis=-1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes = np.where(most > 0, np.rint(x * (np.float32(127) / most)), np.float32(0)).astype(np.int8)
    scale = (most / np.float32(127)).astype(np.float32)
    return np.concatenate((codes.view(np.uint8), scale.view(np.uint8)), axis=-1)


def numbers(form: Format, stored: Bytes) -> Doubles:
    """What rows of the cache stand for."""
    if form is not Format.KV_I8:
        return torch.from_numpy(np.ascontiguousarray(stored)).view(TORCH[form]).double().numpy()
    scale = np.ascontiguousarray(stored[..., -4:]).view(np.float32).astype(np.float64)
    return stored[..., :-4].view(np.int8).astype(np.float64) * scale


def row_bytes(form: Format, dim: int) -> int:
    """Bytes of one head of one token."""
    return dim + 4 if form is Format.KV_I8 else dim * TORCH[form].itemsize
