"""Steps of several rounds on a worker: the tokens that as many steps give, whatever the requests ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from samovar.core.outputs import SequenceOutput
from samovar.core.request import Request
from samovar.core.sampling_params import SamplingParams
from samovar.core.step import ScheduledStep
from samovar.native import library
from samovar.sample.sampler import NOT_FINITE
from samovar.schedule.options import SchedulerOptions
from samovar.schedule.scheduler import Scheduler
from samovar.worker.native_runner import NativeRunner
from samovar.worker.worker import Worker
from tests.worker.tiny_llama import BLOCK, CONTEXT, NUM_BLOCKS, Oracle, make_worker, no_library, prompt

SECONDS = 10.0
"""So long that the machine's speed decides nothing."""


@pytest.fixture(scope="module", params=["native", "torch"])
def worker(request: pytest.FixtureRequest, checkpoint: tuple[Path, Oracle]) -> Worker:
    if request.param == "torch":
        with no_library():
            return make_worker(checkpoint[0])
    if library.find() is None:
        pytest.skip("the CPU kernels are not built")
    return make_worker(checkpoint[0])


def run(
    worker: Worker, asked: list[SamplingParams], seconds: float, length: Callable[[int], int] = lambda i: 5 + 9 * i
) -> tuple[list[list[SequenceOutput]], list[ScheduledStep]]:
    """What each request hears, and the steps."""
    options = SchedulerOptions(
        max_model_len=CONTEXT, block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=256, rounds_seconds=seconds
    )
    scheduler = Scheduler(options, NUM_BLOCKS)
    heard: dict[str, list[SequenceOutput]] = {}
    for i, params in enumerate(asked):
        heard[str(i)] = []
        ids = prompt(length(i), 3 + i)
        scheduler.add(Request(request_id=str(i), prompt_token_ids=ids, params=params, eos_token_ids=[], arrival=0.0))
    steps, flying = [], []
    while scheduler.has_work:
        while len(flying) < 2 and (step := scheduler.schedule(0.0)) is not None:
            flying.append((step, worker.execute(step)))
            steps.append(step)
        step, result = flying.pop(0)
        for output in scheduler.update(step, result, 0.0):
            heard[output.request_id].append(output)
    return list(heard.values()), steps


def tokens(outputs: list[SequenceOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


GREEDY = SamplingParams(temperature=0.0, max_tokens=30)


@pytest.mark.parametrize(
    "others",
    [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.8, "seed": 4, "top_k": 9, "top_p": 0.9, "repetition_penalty": 1.3, "min_tokens": 12},
        {"logprobs": 3},
        {"logit_bias": {7: 0.5}, "presence_penalty": 2.0, "frequency_penalty": 2.0},
    ],
    ids=["greedy", "drawn", "penalties", "logprobs", "bias"],
)
def test_the_same_tokens(worker: Worker, others: dict[str, Any]) -> None:
    """Beside a greedy neighbour, over several blocks, and with an end in the middle of a step."""
    asked = [GREEDY, GREEDY.clone(**others), GREEDY.clone(**others, max_tokens=17)]
    alone, _ = run(worker, asked, 0.0)
    said = tokens(alone[2])
    stop = next(token for at, token in enumerate(said) if at >= 13 and token not in said[:at])
    asked[2] = asked[2].clone(stop_token_ids=[stop])
    one_by_one, steps = run(worker, asked, 0.0)
    assert {step.num_rounds for step in steps} == {1}
    at_once, fewer = run(worker, asked, SECONDS)
    assert any(step.num_rounds == 4 and len(step.sequences) == 3 for step in fewer) and len(fewer) < len(steps) * 2 / 3
    for one, other in zip(one_by_one, at_once, strict=True):
        assert tokens(one) == tokens(other)
        assert (one[-1].finish_reason, one[-1].stop_reason) == (other[-1].finish_reason, other[-1].stop_reason)
        entries = [[p for o in outputs for p in o.logprobs or ()] for outputs in (one, other)]
        assert len(entries[0]) == len(entries[1]) == (len(tokens(one)) if one[0].logprobs else 0)
        for first, second in zip(*entries, strict=True):
            assert first.token_ids == second.token_ids
            np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)


def test_the_oracle_agrees(worker: Worker, oracle: Oracle) -> None:
    """Prompts that end at a block's end, one before and one behind."""
    lengths = [2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1]
    heard, steps = run(worker, [GREEDY] * 3, SECONDS, lambda i: lengths[i])
    assert max(step.num_rounds for step in steps) == 4
    for i, (length, outputs) in enumerate(zip(lengths, heard, strict=True)):
        assert tokens(outputs) == oracle.greedy(prompt(length, 3 + i), 30)


def test_logits_that_are_not_finite(checkpoint: tuple[Path, Oracle], monkeypatch: pytest.MonkeyPatch) -> None:
    """In the third round, of one row: its two tokens are told, then why it ended; its neighbour goes on unharmed."""
    if library.find() is None:
        pytest.skip("the CPU kernels are not built")
    worker = make_worker(checkpoint[0])
    expected, _ = run(worker, [GREEDY] * 2, 0.0)
    assert isinstance(worker._runner, NativeRunner)
    native = worker._runner._native
    most_likely, counts = native.most_likely, [0]

    def sick(rows: Any) -> Any:
        ids = most_likely(rows)
        counts[0] += 1
        if counts[0] == 6:  # prompts, two steps, and two rounds came before
            ids[1] = -1
        return ids

    monkeypatch.setattr(native, "most_likely", sick)
    heard, steps = run(worker, [GREEDY] * 2, SECONDS)
    assert [step.num_rounds for step in steps[:4]] == [1, 1, 1, 4]
    assert tokens(heard[0]) == tokens(expected[0])
    assert tokens(heard[1]) == tokens(expected[1])[:5] and heard[1][-1].error == NOT_FINITE
