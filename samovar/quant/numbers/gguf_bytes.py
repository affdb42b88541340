"""GGML's blocks as integers of eight bits: what has no codes of four bits with one scale for 32 weights."""

from __future__ import annotations

import torch

Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""Codes [rows, in], uint8 or int8, scales and minima float32 [rows, groups]."""


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float32 [rows, blocks] of the float16 number at a byte of every block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16).squeeze(-1).float()


def k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and minima of eight groups, of six bits each in twelve bytes, [rows, blocks, 8]."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), -1).float() * half(blocks, 0)[..., None]
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), -1).float() * half(blocks, 2)[..., None]
    return scales, -minima


def _pairs(packed: torch.Tensor, group: int) -> torch.Tensor:
    """[..., bytes] -> [..., 4 * bytes]: of every `group` bytes, four runs of two-bit values, lowest bits first."""
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device).view(4, 1)
    return ((packed.reshape(*packed.shape[:-1], -1, 1, group) >> shifts) & 3).flatten(-3)


def _nibbles(packed: torch.Tensor, group: int) -> torch.Tensor:
    """[..., bytes] -> [..., 2 * bytes]: of every `group` bytes, first all low halves, then all high ones."""
    cut = packed.reshape(*packed.shape[:-1], -1, 1, group)
    return torch.cat((cut & 15, cut >> 4), -2).flatten(-3)


def _bits(packed: torch.Tensor) -> torch.Tensor:
    """[..., bytes] -> [..., bytes, 8]: each bit, lowest first."""
    return (packed[..., None] >> torch.arange(8, dtype=torch.uint8, device=packed.device)) & 1


def _signed(codes: torch.Tensor, middle: int) -> torch.Tensor:
    """Codes [rows, blocks, in a block] less their middle, int8 [rows, in]."""
    return (codes.to(torch.int8) - middle).flatten(1)


def _q5(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Five bits: the upper ones in a word at a byte, the others behind it."""
    return _nibbles(blocks[..., at + 4 :], 16) | (_bits(blocks[..., at : at + 4]).flatten(-2) << 4)


def q5_0(blocks: torch.Tensor) -> Decoded:
    """Codes of five bits, less 16."""
    return _signed(_q5(blocks, 2), 16), half(blocks, 0), None


def q5_1(blocks: torch.Tensor) -> Decoded:
    """Codes are counted from the middle, which makes minima small."""
    scale = half(blocks, 0)
    return _signed(_q5(blocks, 4), 16), scale, half(blocks, 2) + 16 * scale


def q8_0(blocks: torch.Tensor) -> Decoded:
    """Bytes."""
    return blocks[..., 2:].contiguous().view(torch.int8).flatten(1), half(blocks, 0), None


def q2_k(blocks: torch.Tensor) -> Decoded:
    """Two bits, scales and minima of four bits for 16 weights; codes are counted from 2."""
    scales = (blocks[..., :16] & 15).float() * half(blocks, 80)[..., None]
    minima = (blocks[..., :16] >> 4).float() * half(blocks, 82)[..., None]
    return _signed(_pairs(blocks[..., 16:80], 32), 2), scales.flatten(1), (2 * scales - minima).flatten(1)


def q3_k(blocks: torch.Tensor) -> Decoded:
    """Three bits, of which the third is stored apart, and scales of six bits for 16 weights."""
    low = torch.cat((blocks[..., 96:104] & 15, blocks[..., 96:104] >> 4), -1)
    high = _pairs(blocks[..., 104:108], 4)
    scales = ((low | (high << 4)).float() - 32) * half(blocks, 108)[..., None]
    third = _bits(blocks[..., :32]).transpose(-1, -2).flatten(-2) << 2
    return _signed(_pairs(blocks[..., 32:96], 32) | third, 4), scales.flatten(1), None


def q5_k(blocks: torch.Tensor) -> Decoded:
    """Five bits, of which the fifth is stored apart; scales and minima as in Q4_K."""
    scales, minima = k_scales(blocks)
    fifth = _bits(blocks[..., 16:48]).transpose(-1, -2).flatten(-2) << 4
    return _signed(_nibbles(blocks[..., 48:], 32) | fifth, 16), scales.flatten(1), (16 * scales + minima).flatten(1)


def q6_k(blocks: torch.Tensor) -> Decoded:
    """Six bits, and scales of a byte for 16 weights."""
    scales = blocks[..., 192:208].contiguous().view(torch.int8).float() * half(blocks, 208)[..., None]
    codes = _nibbles(blocks[..., :128], 64) | (_pairs(blocks[..., 128:192], 32) << 4)
    return _signed(codes, 32), scales.flatten(1), None


IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the places of IQ4 mean."""


def _looked_up(places: torch.Tensor) -> torch.Tensor:
    return torch.tensor(IQ4_VALUES, dtype=torch.int8, device=places.device)[places.int()].flatten(1)


def iq4_nl(blocks: torch.Tensor) -> Decoded:
    """Places in a table of integers."""
    return _looked_up(_nibbles(blocks[..., 2:], 16)), half(blocks, 0), None


def iq4_xs(blocks: torch.Tensor) -> Decoded:
    """The same, with scales of six bits."""
    low = _nibbles(blocks[..., 4:8], 1)
    high = _pairs(blocks[..., 2:4], 1)
    scales = ((low | (high << 4)).float() - 32) * half(blocks, 0)[..., None]
    return _looked_up(_nibbles(blocks[..., 8:], 16)), scales.flatten(1), None
