"""GGML's blocks taken apart: codes, scales and minima of 16 or 32 weights each, as the op `coded_linear` wants them.

What has no four-bit codes with a scale for 32 becomes integers of eight bits: nine bits a weight, whatever a file has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from samovar.quant.numbers.gguf_bytes import (
    Decoded,
    half,
    iq4_nl,
    iq4_xs,
    k_scales,
    q2_k,
    q3_k,
    q5_0,
    q5_1,
    q5_k,
    q6_k,
    q8_0,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockType:
    """A type of GGUF files. Weights are (code - 8) * scale, or with `has_minimum` code * scale + minimum; if `kind` has
    eight bits, code * scale, plus the minimum if there is one. `group` weights share a scale."""

    size: int
    bytes: int
    decode: Callable[[torch.Tensor], Decoded]
    kind: str = "int8_16"
    group: int = 32
    has_minimum: bool = False


def _codes(pairs: torch.Tensor) -> torch.Tensor:
    """Bytes [rows, groups, 16 or 32]: the low halves come first -> uint8 [rows, in]."""
    return torch.cat((pairs & 15, pairs >> 4), -1).flatten(1)


def _q4_0(blocks: torch.Tensor) -> Decoded:
    return _codes(blocks[..., 2:]), half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Decoded:
    return _codes(blocks[..., 4:]), half(blocks, 0), half(blocks, 2)


def _q4_k(blocks: torch.Tensor) -> Decoded:
    scales, minima = k_scales(blocks)
    return _codes(blocks[..., 16:].reshape(len(blocks), -1, 32)), scales.flatten(1), minima.flatten(1)


CODED = {
    "Q4_0": BlockType(32, 18, _q4_0, "int4_32"),
    "Q4_1": BlockType(32, 20, _q4_1, "int4_32", has_minimum=True),
    "Q4_K": BlockType(256, 144, _q4_k, "int4_32", has_minimum=True),
    "Q5_0": BlockType(32, 22, q5_0),
    "Q5_1": BlockType(32, 24, q5_1, has_minimum=True),
    "Q8_0": BlockType(32, 34, q8_0),
    "Q2_K": BlockType(256, 84, q2_k, group=16, has_minimum=True),
    "Q3_K": BlockType(256, 110, q3_k, group=16),
    "Q5_K": BlockType(256, 176, q5_k, has_minimum=True),
    "Q6_K": BlockType(256, 210, q6_k, group=16),
    "IQ4_NL": BlockType(32, 18, iq4_nl),
    "IQ4_XS": BlockType(256, 136, iq4_xs),
}
"""Types of which products are computed from the codes."""
