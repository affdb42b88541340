"""CacheSpec: what one layer needs cached, and how rows of it are stored. Read by schedule, cache and attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
class CacheSpec:
    """K/V of one attention layer on one rank.

    `kind` full or sliding (other kinds, latent and recurrent, have their own specs later); `window` in tokens,
    the current one included; `bytes_per_element` of the cache dtype. A row of integers of `head_dim` has a scale of
    `scale_bytes`. `packed` names an entry of `PACKED`, which then says both. Floats of 8 bits are E4M3 but with `is_e5m2`.
    """

    kind: Literal["full", "sliding"]
    num_kv_heads: int
    head_dim: int
    bytes_per_element: int
    window: int | None = None
    scale_bytes: int = 0
    packed: str | None = None
    is_e5m2: bool = False

    @property
    def formats(self) -> tuple[RowFormat, RowFormat]:
        """Of keys, of values."""
        if self.packed is not None:
            return PACKED[self.packed]
        plain = RowFormat(8 * self.bytes_per_element, self.scale_bytes)
        return plain, plain

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
