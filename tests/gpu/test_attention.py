"""Every attention backend that serves the device against the plain one in float32, at sizes that models have."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from samovar.attention.base import AttentionCall, AttentionSpec, Spans, SpanTensors
from samovar.attention.choose import CANDIDATES
from samovar.attention.reference import ReferenceAttention
from samovar.core.cache_spec import CacheSpec
from samovar.hardware.device import probe

BOUND = {torch.float32: 2e-5, torch.bfloat16: 1.2e-2, torch.float16: 2e-3}
"""Norm of the error, as a part of the norm of the result."""


@dataclass(frozen=True)
class Heads:
    """One kind of layer."""

    heads: int
    kv_heads: int
    dim: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


KINDS = {
    "llama-8b": Heads(32, 8, 128),
    "qwen3-0.6b": Heads(16, 8, 128),
    "64": Heads(8, 2, 64),
    "80": Heads(6, 6, 80),
    "96": Heads(12, 4, 96),
    "256": Heads(8, 4, 256),
    "window": Heads(8, 4, 128, window=700),
    "softcap": Heads(8, 2, 128, softcap=20.0),
    "sinks": Heads(16, 2, 64, window=128, has_sinks=True),
}
STEPS: dict[str, list[tuple[int, int]]] = {
    "one": [(1, 577)],
    "decode": [(1, 1 + 37 * i) for i in range(48)],
    "long decode": [(1, 30000), (1, 3), (1, 4097)],
    "prefill": [(1500, 1500)],
    "chunk": [(1024, 4096), (17, 5000)],
    "mixed": [*((1, 1 + 61 * i) for i in range(20)), (300, 300), (64, 1000), (2, 31), (1, 900)],
}
"""(new, visible) tokens of each sequence of a step."""
SMALL: dict[str, list[tuple[int, int]]] = {"decode": [(1, 5), (1, 70)], "mixed": [(1, 33), (40, 40), (7, 90)]}
BLOCK = 32


def spans_of(step: list[tuple[int, int]], device: str) -> tuple[Spans, int]:
    """A step over shuffled blocks, and how many blocks there are."""
    rng = random.Random(6)
    needed = [-(-total // BLOCK) for _, total in step]
    blocks = list(range(sum(needed) + 3))
    rng.shuffle(blocks)
    table = torch.zeros(len(step), max(needed), dtype=torch.int32)
    for row, count in enumerate(needed):
        table[row, :count] = torch.tensor([blocks.pop() for _ in range(count)])
    table = table.to(device)
    new, totals = [n for n, _ in step], [total for _, total in step]
    firsts = torch.tensor([0, *new]).cumsum(0).to(torch.int32).to(device)
    rows = torch.arange(len(step), dtype=torch.int32, device=device)
    tensors = SpanTensors(firsts, torch.tensor(totals, dtype=torch.int32, device=device), rows, table)
    return Spans(new, totals, table if device == "cuda" else table.long(), tensors), sum(needed) + 3


@pytest.mark.parametrize("dtype", list(BOUND), ids=str)
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("kind", list(KINDS))
def test_backends(device: str, kind: str, step: str, dtype: torch.dtype) -> None:
    """Slots that no sequence has written hold NaN: whoever reads one shows it."""
    if device == "cpu" and (step not in SMALL or dtype == torch.float16):
        pytest.skip("small steps only on a CPU")
    if dtype != torch.bfloat16 and (kind != "llama-8b" or step == "long decode"):
        pytest.skip("other types differ in one thing only, and each combination is compiled")
    h, sizes = KINDS[kind], (SMALL if device == "cpu" else STEPS)[step]
    facts = probe(device)
    cache_spec = CacheSpec("full" if h.window is None else "sliding", h.kv_heads, h.dim, dtype.itemsize, h.window)
    spec = AttentionSpec(cache_spec, h.heads, h.softcap, h.has_sinks)
    torch.manual_seed(2)
    spans, num_blocks = spans_of(sizes, device)
    keys, values = (torch.full((num_blocks, h.kv_heads, BLOCK, h.dim), torch.nan, device=device) for _ in range(2))
    for row, (_, total) in enumerate(sizes):
        at = torch.arange(total, device=device)
        block = spans.block_tables[row].long()[at // BLOCK]
        for cache in (keys, values):
            cache[block, :, at % BLOCK] = torch.randn(total, h.kv_heads, h.dim, device=device)
    cache = keys.to(dtype).transpose(1, 2), values.to(dtype).transpose(1, 2)
    if device == "cpu":
        cache = cache[0].contiguous(), cache[1].contiguous()  # as caches lie there
    q = torch.randn(sum(spans.new_tokens), h.heads, h.dim, device=device).to(dtype)
    sinks = torch.randn(h.heads, device=device) if h.has_sinks else None
    call = AttentionCall(h.dim**-0.5, h.window, h.softcap)
    plain = ReferenceAttention()
    exact = plain.run(q.float(), (cache[0].float(), cache[1].float()), plain.plan(spans), call, sinks).double()
    tried = 0
    for candidate in CANDIDATES:
        backend = candidate()
        if backend.name == plain.name or backend.accepts(spec, facts) is not None:
            continue
        tried += 1
        got = backend.run(q, cache, backend.plan(spans), call, sinks)
        assert got.shape == q.shape and got.dtype == dtype
        assert bool(got.isfinite().all()), f"{backend.name} reads slots that nobody wrote"
        error = float((got.double() - exact).norm() / exact.norm())
        assert error <= BOUND[dtype], f"{backend.name}: {error:.3g} of the norm"
    assert tried or device == "cpu", "nothing but the reference serves this layer"
