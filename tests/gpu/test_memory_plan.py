"""The memory plan is true: the hardest work that is allowed stays within it, and nothing grows the second time."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar import LLM
from samovar.hardware.device import memory_reading
from tests.gpu.conftest import release
from tests.gpu.tiny_models import COMMON, KINDS
from tests.gpu.workload import Case, params, run

MakeLLM = Callable[..., LLM]

SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 4, "num_attention_heads": 16,
             "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 16384},
    "cpu": {"vocab_size": 8000, "max_position_embeddings": 2048},
}  # fmt: skip
ENGINE: dict[str, dict[str, Any]] = {
    "cuda": {"max_model_len": 16384, "max_num_batched_tokens": 8192, "max_num_seqs": 256},
    "cpu": {"max_model_len": 1024, "max_num_batched_tokens": 256, "max_num_seqs": 16},
}
CACHE_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}


@pytest.fixture
def wide(tmp_path: Path, device: str) -> Path:
    """A config.json alone: a real vocabulary, few layers."""
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, **KINDS["llama"], **SIZES[device]}))
    return tmp_path


def hard_work(vocab: int, length: int, seqs: int, seed: int) -> list[list[Case]]:
    """Batches that each press on other lines of the plan: prompts as long as they may be, all their log-probabilities,
    every slot sampling with every rule, and all of it together."""
    rng = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [rng.randrange(2, vocab) for _ in range(count)]

    rules = {"temperature": 1.0, "top_k": 1000, "top_p": 0.95, "min_p": 1e-4, "repetition_penalty": 1.1,
             "frequency_penalty": 0.1, "logprobs": 20}  # fmt: skip
    long = [(ids(length - 40), params(max_tokens=4)) for _ in range(3)]
    spoken: list[Case] = [(ids(length - 40), params(max_tokens=4, prompt_logprobs=20))]
    plain: list[Case] = [(ids(20), params(max_tokens=24)) for _ in range(seqs)]
    sampled: list[Case] = [(ids(20), params(max_tokens=24, temperature=1.0, top_p=0.9)) for _ in range(seqs)]
    ruled: list[Case] = [(ids(20), params(max_tokens=24, **rules)) for _ in range(seqs)]
    return [long, spoken, plain, sampled, ruled, [*ruled[: seqs // 2], *long, *plain[: seqs // 2], *spoken]]


def test_the_plan_holds(fresh_llm: MakeLLM, device: str, wide: Path) -> None:
    """What torch reserves stays under the planned lines without the runtime's; what the driver gives, under them all."""
    release(device)
    before, free = 0, 0
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    llm = fresh_llm(
        wide,
        dtype="bfloat16",
        load_format="dummy",
        num_gpu_blocks_override=None,
        kv_cache_memory_bytes=CACHE_BYTES[device],
        **ENGINE[device],
    )
    lines = dict(llm.info.memory_plan)
    readings = []
    for seed in range(2):
        for batch in hard_work(
            llm.info.vocab_size, ENGINE[device]["max_model_len"], ENGINE[device]["max_num_seqs"], seed
        ):
            outcomes = run(llm, batch)
            assert all(outcome.finish_reason == "length" for outcome in outcomes)
        readings.append(memory_reading("cuda" if device == "cuda" else "cpu"))
    if device != "cuda":
        return
    planned = sum(lines.values()) - lines["runtime"]
    (_, first), (_, second) = readings
    assert first - before <= planned, (
        f"{(first - before) >> 20} MiB were reserved, {planned >> 20} MiB planned: {lines}"
    )
    assert second <= first, f"{(second - first) >> 20} MiB more were needed the second time"
    taken = free - torch.cuda.mem_get_info()[0]
    assert taken <= sum(lines.values()), f"{taken >> 20} MiB were taken, {sum(lines.values()) >> 20} MiB planned"
