"""What neighbours do to each other: a long prompt beside a stream, and a step that does not fit into memory."""

from __future__ import annotations

import asyncio
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from samovar import LLM, SamplingParams
from samovar.core.step import ScheduledStep, StepResult
from samovar.engine.in_process_client import InProcessEngineClient
from tests.engine.fakes import FakeWorker, fake_engine, fake_info, request

TOKEN_SECONDS = 0.0002


class SlowWorker(FakeWorker):
    """A step takes time in proportion to its tokens."""

    def execute(self, step: ScheduledStep) -> StepResult:
        time.sleep(TOKEN_SECONDS * step.num_tokens + 0.001)
        result = super().execute(step)
        result.seconds = TOKEN_SECONDS * step.num_tokens + 0.001
        return result


async def test_a_long_prompt_does_not_stall_a_stream() -> None:
    """B074: beside a 4,000-token prompt (0.8 s in one step) a running stream goes on: chunks follow the time target."""
    worker = SlowWorker(600)
    options = {"max_model_len": 8000, "max_num_batched_tokens": 4096, "step_time_target": 0.03}
    client = InProcessEngineClient(fake_engine(worker, **options), fake_info(worker))
    arrivals: list[float] = []

    async def follow() -> None:
        async for _ in client.generate(request([1, 2], 150)):
            arrivals.append(time.monotonic())

    stream = asyncio.ensure_future(follow())
    while len(arrivals) < 20:
        await asyncio.sleep(0.005)
    prompt = [1 + i % 900 for i in range(4000)]
    before, sent = len(arrivals), time.monotonic()
    async for _ in client.generate(request(prompt, 2)):
        pass
    took = time.monotonic() - sent
    assert not stream.done(), "the neighbour was done while the stream ran"
    assert len(arrivals) - before >= 10, "tokens between the chunks of the prompt"
    await stream
    await client.close()
    assert worker.most_tokens < 1000
    # However slow the machine is: no single wait was a large part of the whole.
    assert max(b - a for a, b in pairwise(arrivals)) < took / 2


@pytest.mark.parametrize("fits", [0, 1, 3, 8])
def test_memory_that_runs_out_costs_the_smallest_set(tiny_model: Path, fits: int) -> None:
    """A step that cannot be allocated is computed in parts; only a sequence too large by itself fails."""
    options: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 64, "threads": 1}
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [[5 + i, 6 + i] for i in range(20)]
    with LLM(str(tiny_model), **options) as llm:
        expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
        runner: Any = llm._engine._executor._worker._runner  # type: ignore[attr-defined]
        forward = runner._forward

        def poor(built: Any, result: StepResult) -> None:
            if len(built.sequences) > fits:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes.")
            forward(built, result)

        runner._forward = poor
        outputs = [o.outputs[0] for o in llm.generate(prompts, params, use_tqdm=False)]
        if fits:
            assert [o.token_ids for o in outputs] == expected
        else:
            assert {o.finish_reason for o in outputs} == {"error"} and "memory" in (outputs[0].error or "")
        runner._forward = forward
        assert [o.outputs[0].token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == expected
        assert llm._engine.call("block_usage")["used"] == 0
