"""GGML block formats -> float32, in vectorised torch. One function per format, found by its name.

Every function takes raw blocks, uint8 [num_blocks, bytes_per_block], and returns float32 [num_blocks, block_size]. The
order of multiplications and additions is the reference library's, so the results are equal bit for bit. Formats
without a function here go through the `gguf` package, which is slower. Callers pass a few hundred thousand weights at
a time: intermediates then stay in the CPU's cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from samovar.errors import CheckpointError

NUM_SUPER_WEIGHTS = 256
"""Weights in one super-block of the K and IQ formats."""

_IQ4_VALUES = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.float32
)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block, as float32 [num_blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor, group: int) -> torch.Tensor:
    """uint8 [n, bytes] -> [n, 2 * bytes]: of every `group` bytes, first all low halves, then all high ones."""
    num_blocks, num_bytes = packed.shape
    grouped = packed.reshape(num_blocks, num_bytes // group, 1, group)
    halves = torch.empty(num_blocks, num_bytes // group, 2, group, dtype=torch.uint8)
    torch.bitwise_and(grouped, 15, out=halves[:, :, :1])
    torch.bitwise_right_shift(grouped, 4, out=halves[:, :, 1:])
    return halves.view(num_blocks, 2 * num_bytes)


def _pairs(packed: torch.Tensor, group: int) -> torch.Tensor:
    """uint8 [n, bytes] -> [n, 4 * bytes]: of every `group` bytes, four runs of two-bit values, lowest bits first."""
    num_blocks, num_bytes = packed.shape
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    values = packed.reshape(num_blocks, num_bytes // group, 1, group) >> shifts
    return values.bitwise_and_(3).view(num_blocks, 4 * num_bytes)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, 4] -> [n, 32]: bit i of the little-endian word, moved to value 16."""
    shifts = torch.arange(8, dtype=torch.uint8).view(1, 1, 8)
    return (packed.unsqueeze(2) >> shifts).bitwise_and_(1).bitwise_left_shift_(4).view(len(packed), 32)


def q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale and 32 four-bit values with offset 8."""
    return _nibbles(blocks[:, 2:], 16).float().sub_(8).mul_(_half(blocks, 0))


def q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, minimum and 32 four-bit values."""
    return _nibbles(blocks[:, 4:], 16).float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def q5_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, a word of fifth bits and 32 four-bit values; offset 16."""
    values = _nibbles(blocks[:, 6:], 16).bitwise_or_(_fifth_bits(blocks[:, 2:6]))
    return values.float().sub_(16).mul_(_half(blocks, 0))


def q5_1(blocks: torch.Tensor) -> torch.Tensor:
    """Scale, minimum, a word of fifth bits and 32 four-bit values."""
    values = _nibbles(blocks[:, 8:], 16).bitwise_or_(_fifth_bits(blocks[:, 4:8]))
    return values.float().mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """Scale and 32 signed bytes."""
    return blocks[:, 2:].contiguous().view(torch.int8).float().mul_(_half(blocks, 0))


def iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    """Scale and 32 four-bit places in a fixed table of values."""
    return _IQ4_VALUES[_nibbles(blocks[:, 2:], 16).int()].mul_(_half(blocks, 0))


def iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Super-block scale, eight six-bit scales, 256 four-bit places in a fixed table of values."""
    low = _nibbles(blocks[:, 4:8].reshape(-1, 1), 1).view(-1, 8)
    high = _pairs(blocks[:, 2:4].reshape(-1, 1), 1).view(-1, 8)
    scales = low.bitwise_or_(high.bitwise_left_shift_(4)).float().sub_(32).mul_(_half(blocks, 0))
    values = _IQ4_VALUES[_nibbles(blocks[:, 8:], 16).int()]
    return values.view(-1, 8, 32).mul_(scales.unsqueeze(2)).view(-1, NUM_SUPER_WEIGHTS)


def q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """Sixteen four-bit scales and minima over two-bit values."""
    scales = (blocks[:, :16] & 15).float().mul_(_half(blocks, 80)).unsqueeze(2)
    minima = (blocks[:, :16] >> 4).float().mul_(_half(blocks, 82)).unsqueeze(2)
    values = _pairs(blocks[:, 16:80], 32).view(-1, 16, 16).float()
    return values.mul_(scales).sub_(minima).view(-1, NUM_SUPER_WEIGHTS)


def q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """Sixteen six-bit scales over three-bit values; the third bit is stored apart and inverted."""
    low = torch.cat((blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4), dim=1)
    high = _pairs(blocks[:, 104:108], 4)
    scales = low.bitwise_or_(high.bitwise_left_shift_(4)).float().sub_(32).mul_(_half(blocks, 108)).unsqueeze(2)
    third = _planes(blocks[:, :32]).bitwise_left_shift_(2).view(-1, NUM_SUPER_WEIGHTS)
    values = _pairs(blocks[:, 32:96], 32).bitwise_or_(third).float().sub_(4)
    return values.view(-1, 16, 16).mul_(scales).view(-1, NUM_SUPER_WEIGHTS)


def _planes(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [n, bytes] -> [n, 8, bytes]: plane i holds bit i of every byte."""
    return (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8).view(1, 8, 1)).bitwise_and_(1)


def _scales_and_minima(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima of Q4_K and Q5_K, six bits each in twelve bytes, as float32 [n, 8, 1]."""
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    scale, minimum = _half(blocks, 0), _half(blocks, 2)
    return scales.float().mul_(scale).unsqueeze(2), minima.float().mul_(minimum).unsqueeze(2)


def q4_k(blocks: torch.Tensor) -> torch.Tensor:
    """Eight six-bit scales and minima over four-bit values."""
    scales, minima = _scales_and_minima(blocks)
    values = _nibbles(blocks[:, 16:], 32).view(-1, 8, 32).float()
    return values.mul_(scales).sub_(minima).view(-1, NUM_SUPER_WEIGHTS)


def q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """Eight six-bit scales and minima over five-bit values; the fifth bit is stored apart."""
    scales, minima = _scales_and_minima(blocks)
    fifth = _planes(blocks[:, 16:48]).bitwise_left_shift_(4)
    values = _nibbles(blocks[:, 48:], 32).view(-1, 8, 32).bitwise_or_(fifth).float()
    return values.mul_(scales).sub_(minima).view(-1, NUM_SUPER_WEIGHTS)


def q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Sixteen signed byte scales over six-bit values; the upper two bits are stored apart."""
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float().mul_(_half(blocks, 208)).unsqueeze(2)
    high = _pairs(blocks[:, 128:192], 32).bitwise_left_shift_(4)
    values = _nibbles(blocks[:, :128], 64).bitwise_or_(high).float().sub_(32)
    return values.view(-1, 16, 16).mul_(scales).view(-1, NUM_SUPER_WEIGHTS)


def f32(blocks: torch.Tensor) -> torch.Tensor:
    """Plain float32."""
    return blocks.contiguous().view(torch.float32)


def f16(blocks: torch.Tensor) -> torch.Tensor:
    """Plain float16."""
    return blocks.contiguous().view(torch.float16).float()


def bf16(blocks: torch.Tensor) -> torch.Tensor:
    """Plain bfloat16."""
    return blocks.contiguous().view(torch.bfloat16).float()


def f64(blocks: torch.Tensor) -> torch.Tensor:
    """Plain float64."""
    return blocks.contiguous().view(torch.float64).float()


DEQUANTIZERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": f32, "F16": f16, "BF16": bf16, "F64": f64,
    "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1, "Q8_0": q8_0,
    "Q2_K": q2_k, "Q3_K": q3_k, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k,
    "IQ4_NL": iq4_nl, "IQ4_XS": iq4_xs,
}  # fmt: skip
"""GGML type name -> function; the other types go through the `gguf` package."""


def dequantize(type_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """Raw blocks, uint8 [num_blocks, bytes_per_block] -> float32 [num_blocks, block_size].

    Raises `CheckpointError` for a type that nothing here can dequantize.
    """
    own = DEQUANTIZERS.get(type_name)
    return own(blocks) if own is not None else _by_package(type_name, blocks)


def _by_package(type_name: str, blocks: torch.Tensor) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quants

    try:
        values = quants.dequantize(blocks.numpy(), GGMLQuantizationType[type_name])
    except (NotImplementedError, KeyError) as error:
        raise CheckpointError(
            f"tensors of GGML type {type_name} cannot be dequantized; use another quantization"
        ) from error
    return torch.from_numpy(values)
