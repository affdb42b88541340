"""CacheSpec and StateSpec: what one layer keeps of the tokens before, and how. Read by schedule, cache and attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Literal


@dataclass(frozen=True, slots=True)
class RowFormat:
    """One head's keys, or values, of one token: `bits` for each number, and a scale of `scale_bytes` for them all."""

    bits: int
    scale_bytes: int = 0

    def code_bytes(self, head_dim: int) -> int:
        """Bytes of a row without its scale."""
        return head_dim * self.bits // 8


PACKED: dict[str, tuple[RowFormat, RowFormat]] = {
    "k8v4": (RowFormat(8, 4), RowFormat(4, 2)),
    "tq3.5": (RowFormat(4, 2), RowFormat(3, 2)),
    "tq2.5": (RowFormat(3, 2), RowFormat(2, 2)),
}
"""Formats in which keys and values differ, or have fewer than 8 bits: of keys, of values. Rows of less than 8 bits are
rotated before they are stored (`kernels.write_kv.rows`)."""

KINDS: dict[str, tuple[int, int]] = {"16 bits": (2, 0), "fp8": (1, 0), "int8": (1, 4), **dict.fromkeys(PACKED, (0, 0))}
"""Caches that differ in size, from the largest on: bytes of a number, and of the scale of a row; see `PACKED` for the rest."""


@dataclass(frozen=True, slots=True)
class LatentDims:
    """Multi-head latent attention (DeepSeek V2, 2024): a token's row in the cache is `rank` latent numbers and a turned key
    of `rope` numbers, both shared by all heads. The layer's expansion makes a head's key of `nope` numbers, which the turned
    one follows, and its `value` numbers from the latent ones."""

    rank: int
    rope: int
    nope: int
    value: int

    @property
    def row(self) -> int:
        """Numbers of a row in the cache."""
        return self.rank + self.rope

    @property
    def query(self) -> int:
        """Numbers of a head's query, or of its key once it is expanded."""
        return self.nope + self.rope


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """K/V of one attention layer on one rank.

    `kind` full, sliding or latent, where a token has one row of `head_dim` numbers for all heads, of which values are the
    first (see `latent`), so that nothing is stored twice. `window` in tokens, the current one included;
    `bytes_per_element` of the cache dtype. A row of integers of `head_dim` has a scale of `scale_bytes`. `packed` names an
    entry of `PACKED`, which then says both. Floats of 8 bits are E4M3 but with `is_e5m2`.
    """

    kind: Literal["full", "sliding", "latent"]
    num_kv_heads: int
    head_dim: int
    bytes_per_element: int
    window: int | None = None
    scale_bytes: int = 0
    packed: str | None = None
    is_e5m2: bool = False
    chunk: int | None = None
    """A token sees what is cached of its own run of so many tokens; for full layers."""
    latent: LatentDims | None = None
    """Of a latent layer."""

    @property
    def formats(self) -> tuple[RowFormat, RowFormat]:
        """Of keys, of values; a latent layer's values have no numbers of their own."""
        if self.packed is not None:
            return PACKED[self.packed]
        plain = RowFormat(8 * self.bytes_per_element, self.scale_bytes)
        return plain, RowFormat(0) if self.kind == "latent" else plain

    @property
    def has_row_scales(self) -> bool:
        """Whether every row has a scale of its own."""
        return self.formats[0].scale_bytes > 0

    def stored_as(self, kind: str) -> CacheSpec:
        """The same layer with a cache of another `kind`, one of `KINDS`."""
        if kind in PACKED:
            return replace(self, packed=kind, bytes_per_element=1, scale_bytes=0)
        size, scale = KINDS[kind]
        return replace(self, packed=None, bytes_per_element=size, scale_bytes=scale)

    @property
    def bytes_per_token(self) -> int:
        return self.num_kv_heads * sum(row.code_bytes(self.head_dim) + row.scale_bytes for row in self.formats)


STATE_BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8, "int64": 8, "int32": 4}
"""Kinds of numbers in a state, by the names torch gives them, and their bytes."""


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent layer's state, for one sequence: `dtype` is one of `STATE_BYTES`."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's."""
        return prod(self.shape) * STATE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class StateSpec:
    """What one recurrent layer on one rank remembers of a sequence, however long that is. It begins as zeros."""

    tensors: tuple[StateTensor, ...]

    @property
    def nbytes(self) -> int:
        """Bytes for one sequence."""
        return sum(tensor.nbytes for tensor in self.tensors)
