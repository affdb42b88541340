"""Every attention backend against the reference, on random batches of spans; and how one is chosen."""

from __future__ import annotations

import dataclasses
import random

import pytest
import torch

from samovar.attention.base import AttentionBackend, AttentionCall, AttentionSpec, Spans
from samovar.attention.choose import choose
from samovar.attention.native import NativeAttention
from samovar.attention.reference import ReferenceAttention
from samovar.attention.torch_sdpa import GATHERED_TOKENS, TILE, TorchSdpaAttention, batches_of_similar_length, tile_mask
from samovar.attention.triton import TritonAttention
from samovar.config.groups import DeviceConfig
from samovar.core.cache_spec import CacheSpec
from samovar.core.device_facts import DeviceFacts
from samovar.errors import ConfigError
from samovar.native.facts import with_kernels

CPU = DeviceFacts(kind="cpu", name="cpu", architecture="", total_bytes=1, available_bytes=1, num_threads=1)
HAS_KERNELS = with_kernels(CPU).has_kernels
OTHERS = [
    TorchSdpaAttention,
    pytest.param(NativeAttention, marks=pytest.mark.skipif(not HAS_KERNELS, reason="the CPU kernels are not built")),
]
"""The backends for CPUs; those for GPUs have tests of their own."""


def random_step(
    rng: random.Random, sizes: list[tuple[int, int]], block_size: int, heads: tuple[int, int], dim: int
) -> tuple[Spans, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Spans of (new, total) tokens over a cache in which every slot of no sequence is NaN."""
    lengths = [-(-total // block_size) for _, total in sizes]
    blocks = list(range(sum(lengths) + 3))
    rng.shuffle(blocks)
    tables = torch.full((len(sizes), max(lengths) + 1), blocks.pop())
    cache = torch.full((2, sum(lengths) + 3, block_size, heads[1], dim), torch.nan)
    for row, (length, (_, total)) in enumerate(zip(lengths, sizes, strict=True)):
        for index in range(length):
            tables[row, index] = block = blocks.pop()
            filled = min(block_size, total - index * block_size)
            cache[:, block, :filled] = torch.randn(2, filled, heads[1], dim)
    spans = Spans([new for new, _ in sizes], [total for _, total in sizes], tables)
    return spans, torch.randn(sum(spans.new_tokens), heads[0], dim), (cache[0], cache[1])


def check(
    backend: AttentionBackend,
    step: tuple[Spans, torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
    call: AttentionCall,
    sinks: torch.Tensor | None,
    tolerance: float = 2e-6,
) -> None:
    (spans, q, cache), reference = step, ReferenceAttention()
    expected = reference.run(q, cache, reference.plan(spans), call, sinks)
    plan = backend.plan(spans)
    assert bool(expected.isfinite().all())
    for _ in range(2):  # a plan serves every layer
        got = backend.run(q, cache, plan, call, sinks)
        assert got.shape == q.shape and got.dtype == q.dtype
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=10 * tolerance)


@pytest.mark.parametrize("backend", OTHERS, ids=("torch_sdpa", "native"))
@pytest.mark.parametrize("seed", range(40))
def test_random_steps_match_the_reference(backend: type[AttentionBackend], seed: int) -> None:
    """Chunks, decodes and drafts in any mix; windows, caps and sinks in any combination; NaN in every foreign slot."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = []
    for _ in range(rng.randint(1, 9)):
        new = rng.choice([1, 1, 1, 2, 4, rng.randint(1, 40)])
        sizes.append((new, new + rng.choice([0, 0, 1, rng.randint(0, 60)])))
    kv_heads = rng.choice([1, 2, 3])
    heads = (kv_heads * rng.choice([1, 2, 4]), kv_heads)
    step = random_step(rng, sizes, rng.choice([2, 4, 16]), heads, rng.choice([8, 16, 24]))
    sinks = torch.randn(heads[0]) if rng.random() < 0.3 else None
    cap = rng.choice([None, None, 3.0])
    check(backend(), step, AttentionCall(rng.choice([0.25, 0.4]), rng.choice([None, None, 1, 3, 17]), cap), sinks)


@pytest.mark.parametrize("backend", OTHERS, ids=("torch_sdpa", "native"))
@pytest.mark.parametrize("window", [None, 37, TILE + 9])
@pytest.mark.parametrize("cap", [None, 4.0])
def test_long_chunks_with_and_without_history_match(
    backend: type[AttentionBackend], window: int | None, cap: float | None
) -> None:
    """Several tiles, the last one short; the window's edge inside a tile and beyond one."""
    torch.manual_seed(0)
    sizes = [(2 * TILE + 5, 2 * TILE + 5), (TILE + 1, 2 * TILE + 40), (TILE, TILE), (1, 3 * TILE)]
    check(backend(), random_step(random.Random(1), sizes, 16, (4, 2), 16), AttentionCall(0.25, window, cap), None)


@pytest.mark.parametrize("backend", OTHERS, ids=("torch_sdpa", "native"))
def test_short_and_long_sequences_decode_together(backend: type[AttentionBackend]) -> None:
    torch.manual_seed(0)
    sizes = [(1, total) for total in (1, 8000, 3, 64, 65, 900, 1000, 1, 130)]
    check(backend(), random_step(random.Random(2), sizes, 16, (4, 2), 8), AttentionCall(0.35), None)


@pytest.mark.parametrize("backend", OTHERS, ids=("torch_sdpa", "native"))
def test_16_bit_queries_and_caches(backend: type[AttentionBackend]) -> None:
    torch.manual_seed(0)
    spans, q, cache = random_step(random.Random(3), [(1, 40), (7, 30), (1, 9)], 4, (4, 2), 16)
    for q_type, cache_type in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)):
        step = spans, q.to(q_type), (cache[0].to(cache_type), cache[1].to(cache_type))
        is_exact = q_type == torch.float32 and backend is not NativeAttention  # which may multiply in bfloat16
        check(backend(), step, AttentionCall(0.25), None, 2e-6 if is_exact else 1.6e-2)


def test_padding_stays_bounded_whatever_the_lengths() -> None:
    """Padded keys are under half again of what is needed, plus a few for each sequence, and every sequence is once in
    a batch."""
    rng = random.Random(0)
    for _ in range(200):
        lengths = {i: rng.choice([1, rng.randint(1, 100), rng.randint(1, 20000)]) for i in range(rng.randint(1, 64))}
        batches = batches_of_similar_length(lengths)
        assert sorted(i for batch in batches for i in batch) == sorted(lengths)
        for batch in batches:
            padded = len(batch) * max(lengths[i] for i in batch)
            assert padded <= 1.5 * sum(lengths[i] for i in batch) + 64 * len(batch)
            assert padded <= GATHERED_TOKENS or len(batch) == 1


def test_one_pass_over_the_step_for_many_equal_sequences() -> None:
    assert batches_of_similar_length(dict.fromkeys(range(256), 64)) == [list(range(256))]


@pytest.mark.parametrize("rows", [1, 5, 8])
@pytest.mark.parametrize("window", [None, 1, 4, 30])
def test_tile_mask_hides_exactly_the_future_and_what_left_the_window(rows: int, window: int | None) -> None:
    keys = 12
    mask = tile_mask(rows, keys, window, torch.empty(0))
    for row in range(rows):
        at = keys - rows + row
        visible = [key <= at and (window is None or key > at - window) for key in range(keys)]
        assert (mask[row] == 0).tolist() == visible


def spec(window: int | None = None, **fields: object) -> AttentionSpec:
    kind = "full" if window is None else "sliding"
    return AttentionSpec(CacheSpec(kind, 2, 16, 4, window), 4, **fields)  # type: ignore[arg-type]


def test_choice_is_made_per_kind_and_says_why() -> None:
    route = choose([spec(), spec(8), spec()], CPU, DeviceConfig())
    assert [backend.name for backend in route.backends] == ["torch_sdpa"] and route.groups == (0, 0, 0)
    said = (
        "cudnn: for CUDA GPUs · triton: for CUDA GPUs · native: the CPU kernels are not built · torch_sdpa: chosen · "
        "reference: accepts"
    )
    assert route.lines == (
        f"attention full, 4/2 heads of 16: {said}",
        f"attention window 8, 4/2 heads of 16: {said}",
    )
    named = choose([spec(softcap=5.0)], CPU, DeviceConfig(attention_backend="reference"))
    assert named.backends[0].name == "reference"


def test_the_library_is_preferred_where_it_serves_a_layer() -> None:
    facts = dataclasses.replace(CPU, has_kernels=True)
    odd = AttentionSpec(CacheSpec("full", 2, 20, 4), 4)
    scaled = AttentionSpec(CacheSpec("full", 2, 16, 1, scale_bytes=4), 4)
    route = choose([spec(), odd, spec(8)], facts, DeviceConfig())
    assert [backend.name for backend in route.backends] == ["native", "torch_sdpa"] and route.groups == (0, 1, 0)
    assert "native: head dim 20 is not a multiple of 8 up to 256" in route.lines[1]
    assert NativeAttention().accepts(scaled, facts) == "an int8 cache is for whole steps"


def test_an_unusable_choice_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="no such backend; there are auto, cudnn, triton, native, torch_sdpa, reference"
    ):
        choose([spec()], CPU, DeviceConfig(attention_backend="flash"))
    gpu = DeviceFacts(kind="cuda", name="", architecture="sm_90", total_bytes=1, available_bytes=1, num_threads=1)
    with pytest.raises(ConfigError, match="torch_sdpa: made for CPUs; use --attention-backend auto"):
        choose([spec()], gpu, DeviceConfig(attention_backend="torch_sdpa"))


def test_gpus_take_the_best_or_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN where it can be, which is for plain layers in 16 bits; else Triton."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    gpu = DeviceFacts(kind="cuda", name="", architecture="sm_90", total_bytes=1, available_bytes=1, num_threads=1)
    route = choose([spec()], gpu, DeviceConfig(deterministic=True))
    (backend,) = route.backends
    assert "triton: chosen · native: made for CPUs · torch_sdpa: made for CPUs" in route.lines[0]
    assert isinstance(backend, TritonAttention) and backend.is_deterministic
    half = AttentionSpec(CacheSpec("full", 2, 64, 2), 4)
    route = choose([half, spec(8), half], gpu, DeviceConfig())
    assert [backend.name for backend in route.backends] == ["cudnn", "triton"] and route.groups == (0, 1, 0)
    assert all(backend.captures for backend in route.backends)
    for refused in (spec(), AttentionSpec(CacheSpec("sliding", 2, 64, 2, 8), 4)):
        with pytest.raises(ConfigError, match="no attention backend serves"):
            choose([refused], gpu, DeviceConfig(attention_backend="cudnn"))
    with pytest.raises(ConfigError, match="not deterministic"):
        choose([half], gpu, DeviceConfig(attention_backend="cudnn", deterministic=True))
    odd = AttentionSpec(CacheSpec("full", 2, 20, 2), 4)
    assert "triton: head dim 20 is not a multiple of 8" in choose([odd], gpu, DeviceConfig()).lines[0]
