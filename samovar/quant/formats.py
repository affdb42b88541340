"""The formats in which the CPU library holds weights, and how a checkpoint stores them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samovar.native.abi import Format


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """One format. `code` is the library's word for it.

    A checkpoint stores a row either as numbers of `dtype`, or as blocks of `block_size` weights, `block_bytes` each.
    """

    code: Format
    dtype: torch.dtype = torch.uint8
    block_size: int = 1
    block_bytes: int = 0

    @property
    def name(self) -> str:
        """The name of the format, GGML's where it is one of GGML's."""
        return self.code.name

    @property
    def has_blocks(self) -> bool:
        """Whether a row is blocks of bytes."""
        return self.block_bytes > 0


PLAIN: dict[torch.dtype, WeightFormat] = {
    torch.float32: WeightFormat(Format.F32, torch.float32),
    torch.float16: WeightFormat(Format.F16, torch.float16),
    torch.bfloat16: WeightFormat(Format.BF16, torch.bfloat16),
}
"""Numbers as they are."""

BLOCKS: dict[str, WeightFormat] = {
    code.name: WeightFormat(code, block_size=size, block_bytes=stored)
    for code, size, stored in (
        (Format.Q4_0, 32, 18),
        (Format.Q4_1, 32, 20),
        (Format.Q5_0, 32, 22),
        (Format.Q5_1, 32, 24),
        (Format.Q8_0, 32, 34),
        (Format.Q2_K, 256, 84),
        (Format.Q3_K, 256, 110),
        (Format.Q4_K, 256, 144),
        (Format.Q5_K, 256, 176),
        (Format.Q6_K, 256, 210),
        (Format.IQ4_NL, 32, 18),
        (Format.IQ4_XS, 256, 136),
    )
}
"""GGML's block formats by their names."""
