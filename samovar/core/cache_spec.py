"""CacheSpec: what one layer needs cached. Declared by layers; read by schedule, cache and attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """K/V of one attention layer on one rank.

    `kind` full or sliding (other kinds, latent and recurrent, have their own specs later); `window` in tokens,
    the current one included; `bytes_per_element` of the cache dtype.
    """

    kind: Literal["full", "sliding"]
    num_kv_heads: int
    head_dim: int
    bytes_per_element: int
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.num_kv_heads * self.head_dim * self.bytes_per_element
