"""CacheSpec: what one layer needs cached. Declared by layers; read by schedule, cache and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """K/V of one attention layer on one rank.

    `kind` full or sliding (other kinds, latent and recurrent, have their own specs later); `window` in tokens,
    the current one included; `bytes_per_element` of the cache dtype. A row of integers of `head_dim` has a scale of
    `scale_bytes` behind it.
    """

    kind: Literal["full", "sliding"]
    num_kv_heads: int
    head_dim: int
    bytes_per_element: int
    window: int | None = None
    scale_bytes: int = 0

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """One head's keys, or values, of one token."""
        return self.head_dim * self.bytes_per_element + self.scale_bytes
