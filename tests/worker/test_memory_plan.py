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
from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.config.checkpoint import describe
from samovar.config.engine import EngineConfig
from samovar.config.groups import CacheConfig, ModelConfig, SchedulerConfig
from samovar.config.parse import parse_text
from samovar.core.cache_spec import CacheSpec
from samovar.core.device_facts import DeviceFacts
from samovar.core.step import ScheduledStep
from samovar.errors import ConfigError, MemoryPlanError
from samovar.hardware.device import probe
from samovar.hardware.memory import GIB, MIB, MemoryPlan, ModelShape, attention_bytes, plan_memory
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
