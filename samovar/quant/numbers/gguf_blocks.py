"""GGML's blocks of four-bit codes taken apart: codes, scales and minima of 32 weights each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes uint8 [rows, in], scales and minima float32 [rows, in / 32]."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of GGUF files whose weights are code * scale + minimum, or (code - 8) * scale."""

    size: int
    bytes: int
    decode: Callable[[torch.Tensor], Decoded]


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float32 [rows, blocks] of the float16 number at a byte of every block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def _codes(pairs: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, groups, 16 or 32]: the low halves come first -> uint8 [rows, in]."""
    return torch.cat((pairs & 15, pairs >> 4), -1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> Decoded:
    return _codes(blocks[..., 2:]), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Decoded:
    return _codes(blocks[..., 4:]), _half(blocks, 0), _half(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> Decoded:
    """Eight groups of 32, with scales and minima of six bits in twelve bytes."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), -1).float() * _half(blocks, 0)[..., None]
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), -1).float() * _half(blocks, 2)[..., None]
    return _codes(blocks[..., 16:].reshape(len(blocks), -1, 32)), scales.flatten(1), -minima.flatten(1)


CODED = {"Q4_0": BlockType(32, 18, _q4_0), "Q4_1": BlockType(32, 20, _q4_1), "Q4_K": BlockType(256, 144, _q4_k)}
"""Types of which products are computed from the codes."""
