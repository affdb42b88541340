"""Small integers in larger words: streams of 32-bit words, AWQ's order, and two to a byte.

A dense stream is what GPTQ and compressed-tensors write: value i occupies the bits from i * bits on of the words taken
as one long little-endian number, so a value of three bits may begin in one word and end in the next.
"""

from __future__ import annotations

from math import gcd

import torch

WORD_BITS = 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight values lies in each four bits of a word, lowest first."""


def words_of(bits: int, count: int) -> int:
    """Words that `count` values of `bits` each need."""
    return -(-count * bits // WORD_BITS)


def period(bits: int) -> tuple[int, int]:
    """(values, words) of the shortest stretch of a stream that ends with a whole word."""
    shared = gcd(bits, WORD_BITS)
    return WORD_BITS // shared, bits // shared


def unpack(words: torch.Tensor, bits: int, count: int, axis: int = -1) -> torch.Tensor:
    """Dense stream along `axis`, int32 -> `count` values along it, one a byte."""
    values, step = period(bits)
    words = words.movedim(axis, -1)
    if padding := -words.shape[-1] % step:
        words = torch.nn.functional.pad(words, (0, padding))
    mask = (1 << bits) - 1
    if step == 1:
        found = [((words >> (i * bits)) & mask).to(torch.uint8) for i in range(values)]
        return torch.stack(found, -1).flatten(-2)[..., :count].movedim(-1, axis)
    groups = _split(words, step).to(torch.int64) & 0xFFFFFFFF
    found = []
    for i in range(values):
        word, start = divmod(i * bits, WORD_BITS)
        value = groups[..., word] >> start
        if start + bits > WORD_BITS:
            value = value | (groups[..., word + 1] << (WORD_BITS - start))
        found.append((value & mask).to(torch.uint8))
    return torch.stack(found, -1).flatten(-2)[..., :count].movedim(-1, axis)


def pack(codes: torch.Tensor, bits: int, axis: int = -1) -> torch.Tensor:
    """Values along `axis` -> dense stream along it, int32; the last word is filled up with zeros."""
    values, step = period(bits)
    codes = codes.movedim(axis, -1)
    count = codes.shape[-1]
    groups = _split(torch.nn.functional.pad(codes.to(torch.int64), (0, -count % values)), values)
    words = torch.zeros(*groups.shape[:-1], step, dtype=torch.int64, device=codes.device)
    for i in range(values):
        word, start = divmod(i * bits, WORD_BITS)
        words[..., word] |= (groups[..., i] << start) & 0xFFFFFFFF
        if start + bits > WORD_BITS:
            words[..., word + 1] |= groups[..., i] >> (WORD_BITS - start)
    packed = words.flatten(-2)[..., : words_of(bits, count)]
    return _signed(packed).movedim(-1, axis).contiguous()


def _split(values: torch.Tensor, size: int) -> torch.Tensor:
    """[..., n] -> [..., n / size, size]."""
    return values.reshape(*values.shape[:-1], values.shape[-1] // size, size)


def _signed(words: torch.Tensor) -> torch.Tensor:
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """AWQ's words [rows, n] int32 -> [rows, 8 n] values of four bits, one a byte."""
    shifts = [4 * AWQ_ORDER.index(i) for i in range(8)]
    return torch.stack([((words >> shift) & 15).to(torch.uint8) for shift in shifts], -1).flatten(-2)


def pack_awq(codes: torch.Tensor) -> torch.Tensor:
    """Values of four bits [rows, 8 n] -> AWQ's words [rows, n] int32."""
    groups = _split(codes.to(torch.int64), 8)
    words = torch.zeros(groups.shape[:-1], dtype=torch.int64, device=codes.device)
    for place, i in enumerate(AWQ_ORDER):
        words |= groups[..., i] << (4 * place)
    return _signed(words)


def unpack_pairs(packed: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Bytes [..., n] -> [..., 2 n] values of four bits, one a byte; the low half of a byte comes first unless said."""
    low, high = packed & 15, packed >> 4
    return torch.stack((high, low) if high_first else (low, high), -1).flatten(-2)


def pack_pairs(codes: torch.Tensor, *, high_first: bool = False) -> torch.Tensor:
    """Values of four bits [..., 2 n] -> bytes [..., n]."""
    first, second = _split(codes, 2).unbind(-1)
    low, high = (second, first) if high_first else (first, second)
    packed: torch.Tensor = low | (high << 4)
    return packed.to(torch.uint8)
