"""The tiny model, made once; a worker whose buffers are fresh for every test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from samovar.worker.worker import Worker
from tests.worker.tiny_llama import Driver, Oracle, make_worker, save_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    folder = tmp_path_factory.mktemp("tiny-llama")
    return folder, Oracle(save_checkpoint(folder))


@pytest.fixture(scope="session")
def oracle(checkpoint: tuple[Path, Oracle]) -> Oracle:
    return checkpoint[1]


@pytest.fixture(scope="session")
def shared_worker(checkpoint: tuple[Path, Oracle]) -> Worker:
    return make_worker(checkpoint[0])


@pytest.fixture
def worker(shared_worker: Worker) -> Iterator[Worker]:
    yield shared_worker
    shared_worker.reset_cache()


@pytest.fixture
def driver(worker: Worker) -> Driver:
    return Driver(worker)
