"""The memory plan: arithmetic that adds up, choices that are explained, refusals that name what would help."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from samovar.attention.base import AttentionCall, Spans
from samovar.attention.cudnn import CudnnAttention, long_spans
from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.attention.triton import MAX_PARTS, TritonAttention, meta_spans
from samovar.config.checkpoint import describe
from samovar.config.engine import EngineConfig
from samovar.config.groups import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig
from samovar.config.parse import parse_text
from samovar.core.cache_spec import CacheSpec
from samovar.core.device_facts import DeviceFacts
from samovar.core.step import ScheduledStep
from samovar.errors import ConfigError, MemoryPlanError
from samovar.hardware.device import probe
from samovar.hardware.memory import (
    GIB,
    MIB,
    MemoryPlan,
    ModelShape,
    attention_bytes,
    chunk_bytes,
    decode_buckets,
    plan_memory,
    split_bytes,
)
from samovar.worker.worker import Worker
from tests.worker.tiny_llama import BLOCK, CONTEXT, NUM_BLOCKS, VOCAB

PARAMETERS = 134_515_008
SMOL = ModelShape(
    weight_bytes=2 * PARAMETERS,
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_heads=9,
    head_dim=64,
    max_position_embeddings=8192,
    element_bytes=2,
    cache_specs=(CacheSpec("full", 3, 64, 2),) * 30,
)
"""SmolLM2-135M in bfloat16."""
SMOL_FLOAT32 = replace(
    SMOL, weight_bytes=4 * PARAMETERS, element_bytes=4, cache_specs=(CacheSpec("full", 3, 64, 4),) * 30
)
CPU = DeviceFacts(
    kind="cpu", name="x", architecture="avx2", total_bytes=16 * GIB, available_bytes=12 * GIB, num_threads=4
)
ONE_THREAD = replace(probe("cpu"), num_threads=1)
GPU = replace(CPU, kind="cuda", architecture="sm_90", total_bytes=80 * GIB, available_bytes=79 * GIB)


def plan(
    facts: DeviceFacts = CPU, length: int | None = None, seqs: int = 256, dtype: str = "bfloat16", **cache: Any
) -> MemoryPlan:
    model = ModelConfig(dtype=dtype, max_model_len=length)
    config = EngineConfig(model=model, cache=CacheConfig(**cache), scheduler=SchedulerConfig(max_num_seqs=seqs))
    return plan_memory(SMOL if dtype == "bfloat16" else SMOL_FLOAT32, facts, config)


def test_lines_are_the_sizes_of_the_shape() -> None:
    """SmolLM2-135M: 134.5 million weights, 23,040 bytes of bfloat16 cache a token."""
    lines = dict(plan(num_gpu_blocks_override=1000).lines)
    assert lines["weights"] == 2 * 134_515_008
    assert lines["kv cache"] == 1000 * 16 * 30 * 2 * 3 * 64 * 2
    assert dict(plan(dtype="float32", num_gpu_blocks_override=1000).lines)["weights"] == 4 * 134_515_008


def test_cpu_default_is_moderate() -> None:
    """At most a quarter of the available memory, unless one full sequence needs more; less for few sequences."""
    default, few = plan(), plan(seqs=4)
    assert dict(default.lines)["kv cache"] <= 3 * GIB
    assert dict(few.lines)["kv cache"] < dict(default.lines)["kv cache"]
    assert few.num_blocks * 16 >= 8192 + 16
    tight = replace(CPU, available_bytes=1300 * MIB)
    assert plan(tight).num_blocks * 16 >= 8192 + 16
    assert dict(plan(tight).lines)["kv cache"] > 0.13 * tight.available_bytes


@settings(max_examples=200, deadline=None)
@given(
    facts=st.sampled_from([CPU, GPU, replace(GPU, is_unified=True)]),
    available=st.integers(200 * MIB, 12 * GIB),
    length=st.sampled_from([None, -1, 1, 100, 8192]),
    memory=st.sampled_from([None, "0.5", "1.0", "2GiB", "leave=1GiB", "700MB"]),
    seqs=st.sampled_from([1, 16, 4096]),
)
def test_a_plan_keeps_its_promises(
    facts: DeviceFacts, available: int, length: int | None, memory: str | None, seqs: int
) -> None:
    """Either a plan whose lines fit the budget and whose cache holds one full sequence, or a refusal with a remedy."""
    facts = replace(facts, available_bytes=available)
    try:
        made = plan(facts, length, seqs, memory=memory)
    except MemoryPlanError as error:
        assert re.search(r"use |lower |would fit", str(error)), error
        return
    assert made.total_bytes <= made.budget_bytes <= available
    assert 1 <= made.max_model_len <= 8192
    assert made.num_blocks * 16 >= made.max_model_len + 16
    assert length in (None, -1) or made.max_model_len == length
    assert made.explanation and all(size >= 0 for _, size in made.lines)


def test_the_remedy_works() -> None:
    """The length that a refusal names is accepted, and one a tenth longer is not."""
    facts = replace(CPU, available_bytes=900 * MIB)
    with pytest.raises(MemoryPlanError, match="--max-model-len") as refused:
        plan(facts, memory="760MiB", seqs=4)
    found = re.search(r"--max-model-len (\d+)", str(refused.value))
    assert found
    assert plan(facts, int(found[1]), memory="760MiB", seqs=4).max_model_len == int(found[1])
    with pytest.raises(MemoryPlanError):
        plan(facts, int(found[1]) * 11 // 10, memory="760MiB", seqs=4)
    assert plan(facts, -1, memory="760MiB", seqs=4).max_model_len >= int(found[1]) // 2


def test_too_big_names_the_smallest_change() -> None:
    """Weights in float32 that would fit in bfloat16 say so."""
    with pytest.raises(MemoryPlanError, match="--dtype bfloat16"):
        plan(replace(CPU, available_bytes=1000 * MIB), dtype="float32", length=64, seqs=1)
    with pytest.raises(MemoryPlanError, match="smaller or quantized"):
        plan(replace(CPU, available_bytes=300 * MIB), length=64, seqs=1)


def test_exact_settings() -> None:
    """`num_gpu_blocks_override` and `kv_cache_memory_bytes` are obeyed or refused, never adjusted."""
    assert plan(num_gpu_blocks_override=600).num_blocks == 600
    assert plan(kv_cache_memory_bytes=GIB).num_blocks == GIB // (23040 * 16)
    with pytest.raises(MemoryPlanError, match="would fit"):
        plan(kv_cache_memory_bytes=100 * GIB)
    with pytest.raises(MemoryPlanError, match="--max-model-len"):
        plan(num_gpu_blocks_override=10)


def test_a_cache_that_is_too_small_is_counted_in_blocks() -> None:
    """What is far below a MiB is not shown as 0, and a budget that decides nothing is not named."""
    small = replace(SMOL, cache_specs=(CacheSpec("full", 1, 32, 2),))
    cache = CacheConfig(block_size=8, num_gpu_blocks_override=24)
    config = EngineConfig(model=ModelConfig(max_model_len=256), cache=cache)
    with pytest.raises(MemoryPlanError) as caught:
        plan_memory(small, CPU, config)
    words = str(caught.value)
    assert "needs 33 cache blocks (33 KiB), but there are 24 (24 KiB; --num-gpu-blocks-override 24)" in words
    assert "--max-model-len 184" in words and "available" not in words


def test_budgets() -> None:
    """Fractions are of the whole memory, `leave=` and sizes of what is available."""
    assert plan(memory="0.5").budget_bytes == 8 * GIB
    assert plan(gpu_memory_utilization=0.25).budget_bytes == 4 * GIB
    assert plan(memory="1.0").budget_bytes == 12 * GIB
    assert plan(memory="leave=8GiB").budget_bytes == 4 * GIB
    assert plan(memory="3GB").budget_bytes == 3 * 10**9
    assert plan(GPU).budget_bytes == int(0.9 * 80 * GIB)
    with pytest.raises(MemoryPlanError, match=r"12\.00 GiB are available"):
        plan(memory="13GiB")


@pytest.mark.parametrize("text", ["1G", "4GiB", "3g", "3GB", "900M", "900MB", "1500000k", "2147483648"])
def test_sizes_mean_the_same_everywhere(text: str) -> None:
    """`--memory` and `--kv-cache-memory-bytes` read one size alike: small letters decimal, capitals and GiB binary."""
    size = parse_text(CacheConfig.settings["kv_cache_memory_bytes"], text)
    assert plan(memory=text, num_gpu_blocks_override=600, length=64, seqs=1, facts=CPU).budget_bytes == size


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "8GiBs", "1e9", "leave=", "leave=-1GiB", "0x10", "half"])
def test_not_sizes(text: str) -> None:
    """Anything else is refused by name."""
    with pytest.raises(ConfigError, match=f"--memory: {text.removeprefix('leave=')!r} is neither"):
        plan(memory=text)


def test_the_workers_sizes(shared_worker: Worker) -> None:
    """What the configuration fixes is what the worker has."""
    worker = shared_worker
    assert worker.num_blocks == NUM_BLOCKS and worker.max_model_len == CONTEXT and worker.vocab_size == VOCAB
    assert len(worker.cache_specs) == 3 and worker.config.cache.block_size == BLOCK


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that torch held beside what it held before, while `run` ran."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes = [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())]
    return max(accumulate(changes, initial=0))


@pytest.mark.parametrize("sizes", [[(600, 16384)], [(600, 3000)], [(1, 3000)] * 12], ids=["long", "chunk", "decode"])
@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("window", [None, 7, 4096])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_line_covers_the_backend(
    dtype: torch.dtype, window: int | None, softcap: float | None, sizes: list[tuple[int, int]]
) -> None:
    """What attention really allocates stays under its line; the result (twice: a tile's, and all) is an activation."""
    heads, kv_heads, dim, block = 9, 3, 64, 16
    width = -(-max(total for _, total in sizes) // block)
    tables = torch.arange(len(sizes) * width).view(len(sizes), width)
    cache = torch.randn(2, tables.numel(), block, kv_heads, dim).to(dtype)
    spans = Spans([new for new, _ in sizes], [total for _, total in sizes], tables)
    q = torch.randn(sum(spans.new_tokens), heads, dim).to(dtype)
    backend, call = TorchSdpaAttention(), AttentionCall(dim**-0.5, window, softcap)
    held = peak_bytes(lambda: backend.run(q, (cache[0], cache[1]), backend.plan(spans), call))
    spec = CacheSpec("full" if window is None else "sliding", kv_heads, dim, dtype.itemsize, window)
    shape = replace(
        SMOL, cache_specs=(spec,), element_bytes=dtype.itemsize, keeps_scores=softcap is not None,
    )  # fmt: skip
    assert held - 2 * q.nbytes <= attention_bytes(shape, max(spans.total_tokens), len(sizes)) + MIB


def test_lines_of_a_gpu() -> None:
    """Llama-8B on 140 GiB: what only a GPU needs has its lines, and eager steps need no graphs."""
    shape = ModelShape(
        weight_bytes=16_060_522_496,
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_heads=32,
        head_dim=128,
        max_position_embeddings=131072,
        element_bytes=2,
        cache_specs=(CacheSpec("full", 8, 128, 2),) * 32,
        reads_pages=True,
    )
    facts = replace(GPU, total_bytes=140 * GIB, available_bytes=139 * GIB)
    scheduler = SchedulerConfig(max_num_seqs=256, max_num_batched_tokens=8192)
    config = EngineConfig(cache=CacheConfig(block_size=32), scheduler=scheduler)
    made, lines = plan_memory(shape, facts, config), dict(plan_memory(shape, facts, config).lines)
    assert list(lines) == [
        "weights", "activations", "attention workspace", "logits", "sampling", "block tables and sampler state",
        "graph pool", "graphs", "cuBLAS workspace", "runtime", "kv cache",
    ]  # fmt: skip
    assert 0.98 * made.budget_bytes < made.total_bytes <= made.budget_bytes == int(0.9 * 140 * GIB)
    assert lines["kv cache"] > 100 * GIB
    assert lines["graph pool"] >= 256 * (128256 * 4 + 2 * (4096 + 3 * 14336))
    assert lines["attention workspace"] == split_bytes(shape) < 32 * MIB
    chunks = replace(shape, gathers_chunks=True)
    assert dict(plan_memory(chunks, facts, config).lines)["attention workspace"] == chunk_bytes(shape, 131072, 8192)
    eager = dict(plan_memory(shape, facts, replace(config, device=DeviceConfig(enforce_eager=True))).lines)
    assert "graphs" not in eager and eager["kv cache"] > lines["kv cache"]
    assert dict(plan_memory(replace(shape, reads_pages=False), facts, config).lines)["attention workspace"] > 100 * MIB


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 8, 128), (16, 16, 64), (8, 1, 256), (40, 8, 80)])
def test_the_split_line_covers_the_backend(heads: int, kv_heads: int, dim: int) -> None:
    """What the paged backend allocates for one layer at any batch size, and its counters."""
    shape = replace(SMOL, num_heads=heads, head_dim=dim, cache_specs=(CacheSpec("full", kv_heads, dim, 2),))
    for num_seqs in (1, 3, 64, 256, 1000):
        splits = TritonAttention().splits([100_000] * num_seqs, kv_heads, None)
        parts = num_seqs * kv_heads * splits if splits > 1 else 0
        assert parts * heads // kv_heads * (dim + 2) * 4 + MAX_PARTS * 4 <= split_bytes(shape)


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (8, 8)])
def test_the_line_of_gathered_chunks_covers_the_backend(heads: int, kv_heads: int) -> None:
    """What a chunk holds at once besides its result: padded queries, two partial results with sums, one set of keys."""
    dim, backend = 128, CudnnAttention()
    shape = replace(SMOL, num_heads=heads, head_dim=dim, cache_specs=(CacheSpec("full", kv_heads, dim, 2),))
    for new, total in ((4096, 4096), (8192, 8192), (8191, 32767), (2048, 131072), (4100, 5123)):
        (span,) = long_spans(backend.plan(meta_spans(new, total)))
        rows = span.square * heads * (3 if span.history else 2) * (dim * 2 + 4)
        keys = 2 * dim * 2 * max(span.square * heads, span.history * kv_heads)
        assert rows + keys <= chunk_bytes(replace(shape, element_bytes=2), total, new)


@pytest.mark.parametrize("most", [1, 2, 5, 16, 40, 256, 1000])
def test_decode_buckets(most: int) -> None:
    """They rise to the most, and pad little."""
    buckets = decode_buckets(most)
    assert buckets[-1] == most and list(buckets) == sorted(set(buckets)) and buckets[0] == 1
    for count in range(1, most + 1):
        padded = next(size for size in buckets if size >= count)
        assert padded <= max(count * 1.34, count + 7)


def test_attention_line_grows_with_what_is_visible_only() -> None:
    """A window bounds it; kept scores cost more."""

    def line(length: int, window: int | None = None, keeps_scores: bool = False) -> int:
        specs = (CacheSpec("full" if window is None else "sliding", 2, 16, 2, window),)
        shape = replace(SMOL, cache_specs=specs, keeps_scores=keeps_scores)
        return attention_bytes(shape, length, 256)

    assert line(65536) > line(65536, window=128) == line(131072, window=128)
    assert line(4096, keeps_scores=True) > line(4096)


def test_worker_refuses_early(checkpoint: tuple[Path, object]) -> None:
    """Before loading: an unresolved dtype, and a model that does not fit."""
    description = describe(checkpoint[0], ModelConfig(model=str(checkpoint[0])))
    with pytest.raises(ConfigError, match="resolved"):
        Worker(EngineConfig(), description, ONE_THREAD)
    tiny = replace(ONE_THREAD, available_bytes=MIB)
    with pytest.raises(MemoryPlanError):
        Worker(EngineConfig(model=ModelConfig(dtype="float32")), description, tiny)


def test_steps_need_a_loaded_model(checkpoint: tuple[Path, object]) -> None:
    """A step before `load` is our own bug, said plainly."""
    config = EngineConfig(model=ModelConfig(dtype="float32"))
    worker = Worker(config, describe(checkpoint[0], config.model), ONE_THREAD)
    with pytest.raises(RuntimeError, match="load"):
        worker.execute(ScheduledStep(1))


def test_planning_needs_no_torch() -> None:
    """The arithmetic and the facts of a CPU need no torch."""
    code = (
        "import sys; from samovar.hardware.device import probe, memory_reading; import samovar.hardware.memory;"
        "probe('cpu'); memory_reading('cpu'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_the_plan_is_true() -> None:
    """A fresh process that loads a dummy model and fills every slot stays under the plan (cache pages it touched apart)."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.worker.measured_run"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak, planned = map(int, done.stdout.split())
    print(f"peak {peak >> 20} MiB, planned {planned >> 20} MiB")
    assert planned // 2 <= peak <= planned
