"""What stands between the projections and attention of a latent layer: norm, rotary embedding, the write of a row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from samovar.kernels.op import op
from samovar.kernels.rms_norm import rms_norm


@op(prefer=("triton",), mutates=("q", "cache"), plain_is_best=("cpu",))
def write_latent(
    q: torch.Tensor,
    row: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    interleaved: bool,
) -> None:
    """Turn the last features of every head of q in place, and write each token's row: latent numbers normed, key turned.

    q [tokens, heads, nope + rope]; row [tokens, rank + rope], the latent numbers first, which stays as it is; weight [rank]
    as in `rms_norm`; cos, sin [tokens, 1, rope] as in `rope`; cache [num_blocks, block_size, 1, rank + rope]; slot_mapping
    as in `write_kv`: negative slots are skipped. `interleaved`: neighbouring features are turned together, not those half of
    them apart; they stay where they are.
    """
    rank, turning = len(weight), cos.shape[-1]
    q[..., -turning:] = turned(q[..., -turning:], cos, sin, interleaved)
    key = turned(row[:, None, rank:], cos, sin, interleaved)[:, 0]
    rows = torch.cat((rms_norm(row[:, :rank], weight, eps), key), dim=-1)
    kept = slot_mapping >= 0
    slots, size = slot_mapping[kept], cache.shape[1]
    cache[slots // size, slots % size, 0] = rows[kept].to(cache.dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [tokens, heads, rope] -> the same shape."""
    half = cos.shape[-1] // 2
    c, s = cos[..., :half].float(), sin[..., half:].float()
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    a, b = a.float(), b.float()
    a, b = (a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)
    return torch.stack((a, b), dim=-1).flatten(-2) if interleaved else torch.cat((a, b), dim=-1)


@write_latent.examples
def _examples() -> Iterator[tuple[Any, ...]]:
    cases = (
        # tokens, heads, nope, rope, rank, interleaved
        (3, 4, 16, 8, 32, True),
        (5, 16, 128, 64, 512, True),
        (1, 20, 192, 64, 512, True),
        (4, 5, 64, 32, 256, False),
        (2, 3, 12, 4, 20, True),
        (0, 4, 16, 8, 32, False),
    )
    for tokens, heads, nope, rope, rank, interleaved in cases:
        angle = torch.rand(tokens, 1, rope // 2) * 6
        cos, sin = angle.cos(), angle.sin()
        tables = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        slots = torch.randperm(24)[:tokens]
        slots[2::3] = -1
        joint = torch.randn(tokens, 24 + rank + rope)  # as a product of several projections gives it
        q, cache = torch.randn(tokens, heads, nope + rope), torch.randn(6, 4, 1, rank + rope)
        yield q, joint[:, 24:], torch.randn(rank) / 4 + 1, 1e-6, *tables, cache, slots, interleaved


write_latent.tolerance[torch.float32] = (4e-6, 4e-6)
write_latent.tolerance[torch.bfloat16] = (4e-2, 1.6e-2)
write_latent.tolerance[torch.float16] = (5e-3, 2e-3)
