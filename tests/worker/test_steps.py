"""However sequences are cut into steps, the worker says what Transformers says about the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from samovar.core.sampling_params import SamplingParams
from samovar.hardware import memory
from samovar.sample.sampler import NOT_FINITE
from samovar.worker.worker import Worker
from tests.worker.tiny_llama import BLOCK, VOCAB, Driver, Oracle, Run, make_worker, no_library, prompt

GREEDY = SamplingParams(temperature=0, max_tokens=10)
LENGTHS = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 17, 40, 63)


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[int]]:
    return [oracle.greedy(prompt(length, length), 10) for length in LENGTHS]


def greedy_runs() -> list[Run]:
    return [Run(slot, GREEDY, prompt(length, length)) for slot, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("chunk", [256, 7, 1])
def test_batch_equals_transformers(driver: Driver, expected: list[list[int]], chunk: int, lag: int) -> None:
    """Whole, in chunks, token by token; with the sampled ids read at once or fed from the device unseen."""
    runs = greedy_runs()
    driver.finish(runs, chunk=chunk, lag=lag)
    assert [run.output for run in runs] == expected


@pytest.mark.parametrize("seed", range(12))
def test_any_schedule_equals_transformers(worker: Worker, expected: list[list[int]], seed: int) -> None:
    """Random chunks, batches, orders, lateness, block ids and preemptions (SlotStart with output tokens)."""
    runs = greedy_runs()
    Driver(worker, seed).finish_randomly(runs)
    assert [run.output for run in runs] == expected


MIXED = [
    SamplingParams(temperature=0.9, max_tokens=14, frequency_penalty=0.9, repetition_penalty=1.3, logprobs=2),
    SamplingParams(temperature=0, max_tokens=14, presence_penalty=1.5),
    SamplingParams(temperature=1.2, max_tokens=14, top_p=0.8, bad_words_token_ids=[[5], [6, 7]]),
    SamplingParams(temperature=1.0, max_tokens=14, top_k=9, min_tokens=6),
    SamplingParams(temperature=0, max_tokens=14, logit_bias={3: 5.0}, repetition_penalty=2.0, logprobs=0),
    SamplingParams(temperature=0.7, max_tokens=14, allowed_token_ids=list(range(20)), frequency_penalty=2.0),
]


def mixed_runs() -> list[Run]:
    return [Run(i, p, prompt(9 + 5 * i, i), key=1000 + i, stop_ids=list(range(60))) for i, p in enumerate(MIXED)]


def test_sampling_survives_any_schedule(worker: Worker) -> None:
    """Seeded rows with every rule: tokens in flight, chunks, neighbours and preemption change no token (B064, B067)."""
    alone = []
    for run in mixed_runs():
        Driver(worker).finish([run], lag=0)
        alone.append(run.output)
    assert len({tuple(output) for output in alone}) == len(alone)
    for seed in range(8):
        runs = mixed_runs()
        Driver(worker, seed).finish_randomly(runs)
        assert [run.output for run in runs] == alone
    runs = mixed_runs()
    Driver(worker).finish(runs, lag=1)
    assert [run.output for run in runs] == alone


@pytest.mark.parametrize("size", [1, 2, 8, 44])
def test_logprobs_at_every_batch_size(driver: Driver, oracle: Oracle, size: int) -> None:
    """B067: in float32 the logprobs of one prompt stay within 1e-5 of Transformers at batch 1 to 44, chunked."""
    first = Run(0, SamplingParams(temperature=0, max_tokens=5, logprobs=3), prompt(21, 1))
    others = [Run(i, GREEDY, prompt(5 + i, i)) for i in range(1, size)]
    driver.finish([*others[: size // 2], first, *others[size // 2 :]], chunk=6)
    exact = oracle.logits(first.ids).double().log_softmax(-1)[20:-1]
    for row, entry in enumerate(first.logprobs):
        np.testing.assert_allclose(entry.logprobs, exact[row, entry.token_ids], atol=1e-5)
        assert entry.rank == 1 and entry.token_ids[0] == entry.token_ids[1] == first.output[row]


@pytest.mark.parametrize("chunk", [256, 7, 1])
@pytest.mark.parametrize("count", [0, 3, -1])
def test_prompt_logprobs(
    driver: Driver, oracle: Oracle, count: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S17, B007: every prompt position, over chunk borders and bounded slices of rows, beside ordinary neighbours."""
    monkeypatch.setattr(driver.worker._runner, "_logits_rows", 5)
    ids = prompt(33, 4)
    run = Run(2, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=count), ids)
    other = Run(1, GREEDY, prompt(12, 1))
    driver.finish([other, run], chunk=chunk)
    assert not run.output and other.output == oracle.greedy(other.prompt, 10)
    exact = oracle.logits(ids).double().log_softmax(-1)
    assert len(run.prompt_logprobs) == len(ids) - 1
    for row, entry in enumerate(run.prompt_logprobs):
        assert entry.token_ids[0] == ids[row + 1]
        assert len(entry.token_ids) == 1 + (VOCAB if count < 0 else count)
        np.testing.assert_allclose(entry.logprobs, exact[row, entry.token_ids], atol=1e-5)
        assert entry.rank == 1 + int((exact[row] > exact[row, ids[row + 1]]).sum())


def test_bounded_slices_change_nothing(
    driver: Driver, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits and sampling in turns of a few rows give what one turn gives."""
    monkeypatch.setattr(driver.worker._runner, "_logits_rows", 3)
    monkeypatch.setattr(driver.worker._runner, "_sampling_rows", 2)
    runs = greedy_runs()
    driver.finish(runs)
    assert [run.output for run in runs] == expected
    assert memory.rows_at_once(VOCAB, 1) == 1


@pytest.fixture(scope="module")
def worker_without_library(checkpoint: tuple[Path, Oracle]) -> Worker:
    with no_library():
        return make_worker(checkpoint[0])


@pytest.fixture
def poisoned(worker_without_library: Worker) -> Iterator[int]:
    """A token whose embedding is NaN: whoever has it in the prompt fails. Packed weights are in `test_native`."""
    worker = worker_without_library
    weight = worker.model.model.embed_tokens.weight
    token = next(t for t in range(VOCAB) if all(t not in prompt(length, length) for length in LENGTHS))
    saved = weight[token].clone()
    with torch.inference_mode():
        weight[token] = torch.nan
    worker_logits = worker.model.logits

    def without(hidden: torch.Tensor) -> torch.Tensor:
        """The tied head would make that token's logit NaN for everybody."""
        logits = worker_logits(hidden)
        logits[:, token] = torch.where(hidden.isfinite().all(-1), -50.0, torch.nan)
        return logits

    worker.model.logits = without  # type: ignore[method-assign]
    yield token
    del worker.model.logits
    with torch.inference_mode():
        weight[token] = saved


@pytest.mark.parametrize("place", [0, 5, 8])
def test_a_broken_sequence_fails_alone(
    worker_without_library: Worker, expected: list[list[int]], poisoned: int, place: int
) -> None:
    """NaN in one sequence is reported for it; its neighbours, and later users of its blocks, say what they always say."""
    driver = Driver(worker_without_library)
    runs = greedy_runs()
    bad = Run(20, GREEDY, [*prompt(11, 0)[:place], poisoned, *prompt(11, 1)])
    driver.finish([*runs[:place], bad, *runs[place:]], chunk=9)
    assert bad.error == NOT_FINITE and [run.output for run in runs] == expected
    driver.free = driver.free + bad.blocks
    driver.free.sort(key=lambda block: block in bad.blocks)
    again = [Run(slot, GREEDY, prompt(length, length)) for slot, length in enumerate(LENGTHS)]
    driver.freed_slots = [*range(len(LENGTHS)), 20]
    driver.finish(again, chunk=5)
    assert [run.output for run in again] == expected


def test_bad_indices_fail_alone(driver: Driver, expected: list[list[int]]) -> None:
    """Ids outside the vocabulary, blocks outside the cache, tokens beyond the blocks: the row is left out and reported."""
    runs = greedy_runs()
    for slot, ids in ((30, [1, VOCAB, 2]), (31, [-1]), (32, [5, 2**40])):
        runs.append(Run(slot, GREEDY, ids))
    wild = Run(33, GREEDY, [1, 2, 3], blocks=[10**6])
    short = Run(34, GREEDY, prompt(100, 1), blocks=[])
    driver.free.append(-3)
    below = Run(35, GREEDY, [4])
    driver.finish([below, *runs, wild], chunk=300)
    assert [run.output for run in runs[: len(LENGTHS)]] == expected
    assert all("vocabulary" in (run.error or "") for run in runs[len(LENGTHS) :])
    assert "cache block" in (wild.error or "") and "cache block" in (below.error or "")
    short.params = SamplingParams(temperature=0, max_tokens=60)
    driver.finish([short])
    assert "context" in (short.error or "")


def test_blocks_are_copied_before_the_step(driver: Driver, oracle: Oracle) -> None:
    """`block_copies` lets a second sequence go on from a copy while the first overwrites its own."""
    ids = prompt(2 * BLOCK, 3)
    first = Run(0, GREEDY, ids)
    driver.launch([(first, 2 * BLOCK)])
    driver.tell()
    copies = [(source, driver.free.pop()) for source in first.blocks]
    second = Run(1, GREEDY, [*ids[:-1], 9], blocks=[target for _, target in copies])
    second.computed = 2 * BLOCK - 1
    share = second.blocks
    second.blocks = []
    driver.free += reversed(share)
    driver.launch([(second, 1), (first, 1)], copies)
    driver.tell()
    driver.finish([first, second])
    assert first.output == oracle.greedy(ids, 10) and second.output == oracle.greedy(second.prompt, 10)


def test_result_is_in_batch_order(driver: Driver) -> None:
    """Sampled rows come back in batch order, rows that do not sample are absent, and time was measured."""
    runs = [Run(slot, GREEDY, prompt(6, slot)) for slot in (7, 3, 30, 1)]
    result = driver.launch([(runs[0], 6), (runs[1], 5), (runs[2], 6), (runs[3], 6)])
    assert [sampled.slot for sampled in result.sampled] == [7, 30, 1]
    assert result.seconds > 0 and result.step_id == 1


def test_an_empty_step(worker: Worker) -> None:
    """A step that only frees slots runs nothing and fails nothing."""
    from samovar.core.step import ScheduledStep

    result = worker.execute(ScheduledStep(5, freed_slots=[3, 4]))
    assert (result.step_id, result.sampled, result.failed) == (5, [], {})
