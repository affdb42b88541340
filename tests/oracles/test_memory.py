"""What finished requests leave behind: nothing."""

from __future__ import annotations

import gc
from pathlib import Path

import psutil
import pytest

from samovar import LLM, SamplingParams
from samovar.engine.prompts import PromptType
from tests.oracles.workload import OPTIONS


@pytest.mark.parametrize("count", [1500, pytest.param(20_000, marks=pytest.mark.slow)])
def test_memory_is_flat(tiny_model: Path, count: int) -> None:
    """B076: one-token requests with unique prompts and prefix caching: less than 1 MB per 1,000 after warm-up."""
    params = SamplingParams(temperature=0.0, max_tokens=1)
    process = psutil.Process()
    with LLM(str(tiny_model), **{**OPTIONS, "num_gpu_blocks_override": 200}) as llm:

        def classify(first: int, number: int) -> None:
            for start in range(first, first + number, 100):
                prompts: list[PromptType] = [
                    [3 + i % 300, 3 + i // 300 % 300, *range(3, 36)] for i in range(start, start + 100)
                ]
                llm.generate(prompts, params, use_tqdm=False)

        classify(0, 1000)
        gc.collect()
        before = process.memory_info().rss
        classify(1000, count)
        gc.collect()
        grown = process.memory_info().rss - before
    assert grown < max(4 * 2**20, count / 1000 * 2**20)
