"""Small integers and their scales -> GGML's blocks of 32 weights: a float16 scale, then what fits the integers exactly."""

from __future__ import annotations

import torch

BLOCK = 32
RANGES = {"Q4_0": (-8, 7), "Q5_0": (-16, 15), "Q8_0": (-128, 127)}
"""Formats whose weights are an integer times the block's scale, narrowest first, and the integers they hold."""


def narrowest(low: int, high: int) -> str | None:
    """The first format that holds every integer from `low` to `high`; None if none does."""
    return next((name for name, (least, most) in RANGES.items() if least <= low and high <= most), None)


def encode(name: str, levels: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """levels int8 [rows, in] in the format's range, scale float16 [rows, in / 32] -> uint8 [rows, in / 32, bytes]."""
    blocks = levels.view(len(levels), -1, BLOCK)
    head = scale.contiguous().view(torch.uint8).view(*blocks.shape[:2], 2)
    if name == "Q8_0":
        return torch.cat((head, blocks.view(torch.uint8)), -1)
    codes = (blocks - RANGES[name][0]).to(torch.uint8)
    low, high = codes[..., : BLOCK // 2], codes[..., BLOCK // 2 :]
    pairs = (low & 15) | (high << 4)
    if name == "Q4_0":
        return torch.cat((head, pairs), -1)
    fifth = (codes >> 4).view(*blocks.shape[:2], BLOCK // 8, 8)
    places = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8)
    return torch.cat((head, (fifth * places).sum(-1, dtype=torch.uint8), pairs), -1)
