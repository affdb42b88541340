"""Random weights as checkpoints store them, of every format that libsamovar packs, with scales of a sane size."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from samovar.native.abi import Format
from samovar.weights.dequantize import dequantize

PLAIN = (Format.F32, Format.F16, Format.BF16)
FLAT = (Format.Q4_0, Format.Q4_1, Format.Q5_0, Format.Q5_1, Format.Q8_0, Format.IQ4_NL)
SUPER = (Format.Q2_K, Format.Q3_K, Format.Q4_K, Format.Q5_K, Format.Q6_K, Format.IQ4_XS)
WEIGHT_FORMATS = (*PLAIN, Format.I8, *FLAT, *SUPER)

BLOCK_BYTES = {
    Format.Q4_0: 18, Format.Q4_1: 20, Format.Q5_0: 22, Format.Q5_1: 24, Format.Q8_0: 34, Format.IQ4_NL: 18,
    Format.Q2_K: 84, Format.Q3_K: 110, Format.Q4_K: 144, Format.Q5_K: 176, Format.Q6_K: 210, Format.IQ4_XS: 136,
}  # fmt: skip
HALVES = {
    Format.Q4_0: (0,), Format.Q4_1: (0, 2), Format.Q5_0: (0,), Format.Q5_1: (0, 2), Format.Q8_0: (0,), Format.IQ4_NL: (0,),
    Format.Q2_K: (80, 82), Format.Q3_K: (108,), Format.Q4_K: (0, 2), Format.Q5_K: (0, 2), Format.Q6_K: (208,),
    Format.IQ4_XS: (0,),
}  # fmt: skip
"""Where the float16 numbers of a block stand."""


def block_of(format: Format) -> int:
    """Columns of a block."""
    return 256 if format in SUPER else 32 if format in FLAT else 1


def random_source(format: Format, rows: int, cols: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Source rows of samovar_pack, uint8 [rows, bytes]: any codes, scales that keep weights near one."""
    if format in PLAIN:
        values = torch.from_numpy(rng.standard_normal((rows, cols), dtype=np.float32))
        type_ = {Format.F32: torch.float32, Format.F16: torch.float16, Format.BF16: torch.bfloat16}[format]
        return values.to(type_).view(torch.uint8).numpy()
    if format is Format.I8:
        codes = rng.integers(-128, 128, (rows, cols)).astype(np.int8)
        scales = rng.uniform(0.001, 0.02, (rows, 1)).astype(np.float32)
        return np.concatenate((codes.view(np.uint8), scales.view(np.uint8)), axis=1)
    num_blocks = rows * cols // block_of(format)
    blocks = rng.integers(0, 256, (num_blocks, BLOCK_BYTES[format]), dtype=np.uint8)
    for at in HALVES[format]:
        scale = 0.001 if format in SUPER else 0.02
        blocks[:, at : at + 2] = (rng.standard_normal((num_blocks, 1)) * scale).astype(np.float16).view(np.uint8)
    return blocks.reshape(rows, -1)


def expected_values(format: Format, source: NDArray[np.uint8], cols: int) -> NDArray[np.float32]:
    """Source rows as float32 [rows, cols], by the reference."""
    if format is Format.I8:
        scales = np.ascontiguousarray(source[:, cols:]).view(np.float32)
        return source[:, :cols].view(np.int8).astype(np.float32) * scales
    block_bytes = BLOCK_BYTES.get(format) or source.shape[1] // cols
    return dequantize(format.name, torch.from_numpy(source).view(-1, block_bytes)).view(len(source), cols).numpy()
