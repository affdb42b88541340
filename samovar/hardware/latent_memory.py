"""What attention over latent rows holds while it runs: sizes that its kernels keep to, and the memory plan counts."""

from __future__ import annotations

from samovar.core.cache_spec import LatentDims

LATENT_PARTS = 512
"""Most tiles of rows times parts of their keys whose sums wait to be joined, on a GPU."""
LATENT_ROWS = 64
"""Most rows of such a tile."""
LATENT_QUERIES = 1024
"""Queries of chunks, of all heads each, that are absorbed at once."""
LATENT_MADE = 256 << 20
"""Bytes of keys and values that are made at once."""
LATENT_SCORES = 1 << 20
"""Most scores, and most numbers of keys and values, that exist at once on a CPU."""
LATENT_COPIES = 6
"""Float32 copies of these that torch may hold."""


def made_at_once(dims: LatentDims, heads: int, element_bytes: int) -> int:
    """Keys of which keys and values for all heads are made at once on a GPU."""
    return max(1024, LATENT_MADE // (heads * (dims.nope + dims.value) * element_bytes))


def gpu_bytes(dims: LatentDims, heads: int, element_bytes: int, *, length: int, tokens: int, num_seqs: int) -> int:
    """Most that a step of up to `tokens` tokens and `num_seqs` sequences of `length` holds on a GPU: absorbed queries, their
    results and the parts of these; or rows, keys and values, and what is kept between passes. The result is in both."""
    queries = max(num_seqs, LATENT_QUERIES) * heads * 2 * dims.rank * element_bytes
    absorbed = queries + LATENT_PARTS * LATENT_ROWS * (dims.rank + 2) * 4
    keys = made_at_once(dims, heads, element_bytes)
    made = keys * (dims.row + heads * (dims.nope + dims.value)) * element_bytes
    kept = tokens * heads * (dims.value + 2) * 4 if length > keys else 0
    return max(absorbed, made + kept) + tokens * heads * dims.value * element_bytes


def cpu_bytes(
    dims: LatentDims, heads: int, element_bytes: int, *, keys: int, tokens: int, num_seqs: int, cache_bytes: int
) -> int:
    """The same on a CPU, where up to `keys` rows are gathered at once."""
    rows = keys * dims.row * (cache_bytes + 2 * 4)
    decode = num_seqs * heads * (dims.row + dims.rank) * 4 + 3 * keys * heads * 4
    chunk = LATENT_COPIES * max(LATENT_SCORES, keys * max(heads, dims.query + dims.value)) * 4
    absorbed = tokens * heads * (dims.row + dims.rank) * 4
    return rows + max(decode, chunk + absorbed) + tokens * heads * dims.value * element_bytes
