"""What decode and prefill share: products, scores, and the end of an online softmax. Scores are in base 2."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter multiplies matrices of bfloat16 as if they were integers: it gets float32."""


@triton.jit
def product(a: tl.tensor, b: tl.tensor, total: tl.tensor) -> tl.tensor:
    """total + a b, in float32; `total` may be None."""
    if INTERPRETED:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def scaled_scores(products: tl.tensor, scale: tl.tensor, SOFTCAP: tl.constexpr) -> tl.tensor:
    """q.k -> score * log2(e), with the soft cap if there is one (0: none). `scale` is in natural units."""
    if SOFTCAP > 0:
        # tanh(x) = 1 - 2 / (e^2x + 1)
        powers = tl.exp2(products * (scale * (2 * LOG2E / SOFTCAP)))
        return SOFTCAP * LOG2E - (2 * SOFTCAP * LOG2E) / (powers + 1)
    return products * (scale * LOG2E)


@triton.jit
def finished(
    sums: tl.tensor, most: tl.tensor, weight: tl.tensor, sinks: tl.tensor, heads: tl.tensor, is_head: tl.tensor
) -> tl.tensor:
    """Weighted values [rows, dim] from sums, largest scores and sums of weights; a row without keys gives zeros.

    `sinks` (or None) are read at `heads` [rows] where `is_head`.
    """
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=is_head, other=float("-inf")) * LOG2E
        higher = tl.maximum(most, sink)
        higher = tl.where(higher == float("-inf"), 0.0, higher)
        weight = weight * tl.exp2(most - higher) + tl.exp2(sink - higher)
        sums = sums * tl.exp2(most - higher)[:, None]
    return sums / tl.where(weight > 0, weight, 1.0)[:, None]
