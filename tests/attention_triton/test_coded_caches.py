"""Caches of codes: written and read by Triton kernels, against the reference that reads what was written.

Where nothing was written, codes and scales are as large as can be: whoever reads one shows it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from samovar.attention import cudnn
from samovar.attention.base import AttentionCall, LayerCache, Spans, SpanTensors
from samovar.attention.cudnn import CudnnAttention
from samovar.attention.reference import ReferenceAttention
from samovar.attention.triton import TritonAttention
from samovar.cache.kv_cache import KVCache
from samovar.core.cache_spec import CacheSpec
from samovar.kernels.write_kv import write_kv
from samovar.kernels.write_kv.rows import as_bytes
from tests.attention_triton.test_triton_attention import dense

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPECS = {
    "fp8_e4m3": (torch.float8_e4m3fn, {}),
    "fp8_e5m2": (torch.float8_e5m2, {"is_e5m2": True}),
    "int8": (torch.int8, {"scale_bytes": 4}),
    "k8v4": (torch.uint8, {"packed": "k8v4"}),
    "tq3.5": (torch.uint8, {"packed": "tq3.5"}),
    "tq2.5": (torch.uint8, {"packed": "tq2.5"}),
}
KINDS = [*SPECS, "fp8_e4m3 scaled"]
PLAIN = AttentionCall(0.2)


def kinds(*quick: str) -> list[object]:
    """All kinds; those that are not `quick` only where there is time."""
    return [kind if kind in quick else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@dataclass(frozen=True)
class Step:
    """Queries, a cache in which every sequence was written, and what describes it."""

    q: torch.Tensor
    cache: LayerCache
    spans: Spans


def nobodys(codes: torch.Tensor) -> int:
    """A byte that is never written: -128 of int8, no number of floats. There is none of packed codes: their scales tell."""
    return 0x80 if codes.dtype == torch.int8 else 0x7F


def coded_cache(kind: str, heads: int, dim: int, blocks: tuple[int, int]) -> LayerCache:
    """As a layer has it, filled with what nobody may read."""
    dtype, options = SPECS[kind.split()[0]]
    spec = CacheSpec("full", heads, dim, 1, **options)  # type: ignore[arg-type]
    layer = KVCache([spec], *blocks, dtype, DEVICE, is_head_major=True).layers[0]
    for codes in layer[:2]:
        as_bytes(codes).fill_(nobodys(codes))
    for scales in layer[2:]:
        scales.fill_(torch.nan)
    if "scaled" in kind:
        generator = torch.Generator().manual_seed(heads)
        return *layer, *(torch.rand((2, heads), generator=generator) + 0.5).to(DEVICE).unbind()
    return layer


def make_step(
    kind: str,
    sizes: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    seed: int = 0,
) -> Step:
    """Sequences of (new, total) tokens, in blocks in random order; keys are larger than values, as models have them."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    lengths = [-(-total // block_size) for _, total in sizes]
    cache = coded_cache(kind, heads[1], dim, (sum(lengths) + 2, block_size))
    blocks = list(range(sum(lengths) + 2))
    rng.shuffle(blocks)
    tables = torch.zeros((len(sizes), max(lengths) + 1), dtype=torch.int32)
    for i, (new, total) in enumerate(sizes):
        for at in range(lengths[i]):
            tables[i, at] = blocks.pop()
        first = 0 if window is None else max(0, total - new - window + 1)
        at = torch.arange(first, total)
        slots = tables[i, at // block_size].long() * block_size + at % block_size
        k, v = torch.randn((2, len(at), heads[1], dim), generator=generator)
        write_kv(*(x.to(DEVICE, dtype) for x in (3 * k, v)), *cache[:2], slots.to(DEVICE), *cache[2:])
    first_rows = [sum(new for new, _ in sizes[:i]) for i in range(len(sizes) + 1)]
    q = torch.randn((first_rows[-1], heads[0], dim), generator=generator)
    ints = [first_rows, [total for _, total in sizes], list(range(len(sizes)))]
    starts, totals, rows = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ints)
    tables = tables.to(DEVICE)
    spans = Spans([new for new, _ in sizes], ints[1], tables, SpanTensors(starts, totals, rows, tables))
    return Step(q.to(DEVICE, dtype), cache, spans)


def check(
    step: Step,
    call: AttentionCall = PLAIN,
    sinks: torch.Tensor | None = None,
    *,
    splits: int | None = None,
    backend: TritonAttention | None = None,
    tolerance: float = 2e-5,
) -> None:
    """Triton's result against the reference's, which a window hides nothing from but scores."""
    backend = backend or TritonAttention()
    plan = backend.plan(step.spans)
    if splits is not None:
        plan.splits[step.cache[0].shape[2], call.window] = splits
    clean = tuple(
        t if t.dtype == torch.uint8 else as_bytes(t).where(as_bytes(t) != nobodys(t), 0).view(t.dtype)
        for t in step.cache[:2]
    )
    clean += tuple(t.nan_to_num() for t in step.cache[2:])
    expected = ReferenceAttention().run(step.q, clean, step.spans, call, sinks)
    assert bool(expected.isfinite().all())
    got = backend.run(step.q, step.cache, plan, call, sinks)
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=10 * tolerance)
    assert not plan.counters.any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_decode(kind: str, splits: int) -> None:
    step = make_step(kind, [(1, total) for total in (150, 1, 64, 65)], heads=(4, 1))
    check(step, splits=splits)
    check(step, AttentionCall(0.2, None, 5.0), torch.randn(4, device=DEVICE), splits=splits)


@pytest.mark.parametrize("kind", kinds("int8"))
@pytest.mark.parametrize("heads", [(6, 2), pytest.param((20, 1), marks=pytest.mark.slow)])
def test_prompts_chunks_and_groups(kind: str, heads: tuple[int, int]) -> None:
    step = make_step(kind, [(1, 90), (40, 40), (7, 70), (2, 2)], heads=heads, dim=24)
    check(step, splits=2)
    check(step, AttentionCall(0.2, None, 5.0), torch.randn(heads[0], device=DEVICE))


@pytest.mark.parametrize("kind", kinds("fp8_e4m3 scaled"))
def test_windows(kind: str) -> None:
    step = make_step(kind, [(1, 150), (1, 20), (60, 130)], window=37)
    check(step, AttentionCall(0.3, 37), splits=2)


@pytest.mark.parametrize("kind", kinds())
@pytest.mark.parametrize("block_size", [8, 32])
@pytest.mark.parametrize("dim", [16, 80, 128])
def test_sizes(kind: str, block_size: int, dim: int) -> None:
    step = make_step(kind, [(1, 70), (9, 30)], heads=(4, 2), dim=dim, block_size=block_size)
    check(step, AttentionCall(dim**-0.5), splits=2)


@pytest.mark.parametrize("kind", kinds("fp8_e4m3", "int8"))
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 1.6e-2), (torch.float16, 2e-3)])
def test_sixteen_bits(kind: str, dtype: torch.dtype, tolerance: float) -> None:
    """Multiplied as float16 in either case, also where queries are beyond its largest number. Levels of packed codes are
    computed in it: three more roundings of numbers in products."""
    tolerance *= 3 if "packed" in SPECS[kind.split()[0]][1] else 1
    step = make_step(kind, [(1, 100), (70, 100)], heads=(4, 1), dim=64, dtype=dtype)
    check(step, AttentionCall(0.125), splits=2, tolerance=tolerance)
    if dtype == torch.bfloat16:
        large = Step(step.q * 1e6, step.cache, step.spans)
        check(large, AttentionCall(0.125e-6), tolerance=tolerance)


@pytest.mark.parametrize("kind", kinds("int8", "tq3.5"))
def test_long_prompts_through_dense_attention(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gathered is what was stored."""
    for name, size in (
        ("LONG", 40),
        ("HISTORY_STEP", 32),
        ("SQUARE_STEP", 16),
        ("LONG_AFTER", 20),
        ("LONG_HISTORY", 100),
    ):
        monkeypatch.setattr(cudnn, name, size)
    used = []

    def exact(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall, *, is_causal: bool) -> object:
        used.append(k.dtype)
        y, sums = dense(q.float(), k.float(), v.float(), call, is_causal=is_causal)
        return y.to(q.dtype), sums

    monkeypatch.setattr(cudnn, "attend_dense", exact)
    step = make_step(kind, [(1, 20), (50, 120), (64, 64), (25, 125)], heads=(4, 1), dtype=torch.float16)
    check(step, backend=CudnnAttention(), tolerance=4e-3)
    assert used and set(used) == {torch.float16}
