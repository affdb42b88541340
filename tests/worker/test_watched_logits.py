"""Whoever watches sees the logits behind prompt logprobs: every row, where it belongs, on every kind of runner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samovar.core.sampling_params import SamplingParams
from samovar.worker.worker import Worker
from tests.worker.host_stream import put_on_stream
from tests.worker.tiny_llama import VOCAB, Driver, Oracle, Run, make_worker, no_library, prompt

IDS = prompt(33, 4)


def seen_by(worker: Worker, chunk: int) -> torch.Tensor:
    """All rows of `IDS`, beside a neighbour that asks for no logprobs and is not seen."""
    rows = torch.full((len(IDS) - 1, VOCAB), torch.nan)

    def watch(position: int, logits: torch.Tensor) -> None:
        rows[position : position + len(logits)] = logits

    worker.watch_logits(watch)
    run = Run(2, SamplingParams(temperature=0, max_tokens=0, prompt_logprobs=0), IDS)
    other = Run(1, SamplingParams(temperature=0, max_tokens=3), prompt(12, 1))
    Driver(worker).finish([other, run], chunk=chunk)
    worker.watch_logits(None)
    Driver(worker, seed=1).finish([Run(3, SamplingParams(max_tokens=0, prompt_logprobs=0), prompt(40, 5))])
    return rows


@pytest.mark.parametrize("chunk", [256, 7])
def test_on_a_cpu(driver: Driver, oracle: Oracle, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.worker._runner, "_logits_rows", 5)
    torch.testing.assert_close(seen_by(driver.worker, chunk), oracle.logits(IDS)[:-1], atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("chunk", [256, 7])
def test_on_a_stream(
    checkpoint: tuple[Path, Oracle], oracle: Oracle, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with no_library():
        worker = make_worker(checkpoint[0])
    _, runner = put_on_stream(worker)
    monkeypatch.setattr(runner, "_sampling_rows", 5)
    torch.testing.assert_close(seen_by(worker, chunk), oracle.logits(IDS)[:-1], atol=1e-4, rtol=1e-5)
