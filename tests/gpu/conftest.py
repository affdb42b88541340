"""Engines on the device under test. `--device cpu` runs the same tests without a GPU, to test the tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar import LLM
from tests.gpu.tiny_models import KINDS, write_model
from tests.gpu.workload import OPTIONS, Case, Outcome, greedy_cases, run

MakeLLM = Callable[..., LLM]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cuda", "cpu"), default="cuda", help="device under test")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """Device kind under test; skips where it is a GPU and there is none."""
    kind: str = request.config.getoption("--device", default="cuda")
    if kind == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here; --device cpu runs these tests without one")
    return kind


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of tiny model -> its checkpoint."""
    return {kind: write_model(tmp_path_factory.mktemp(kind), kind) for kind in KINDS}


@pytest.fixture(scope="session")
def engines(device: str, folders: dict[str, Path]) -> Iterator[MakeLLM]:
    """(kind of model, options) -> an engine, made once in the session for equal arguments."""
    made: dict[tuple[Any, ...], LLM] = {}

    def make(kind: str, **options: Any) -> LLM:
        key = (kind, *sorted(options.items()))
        if key not in made:
            made[key] = LLM(str(folders[kind]), **{**OPTIONS, "device": device, **options})
        return made[key]

    yield make
    while made:
        made.popitem()[1].shutdown()
    release(device)


@pytest.fixture
def fresh_llm(device: str, folders: dict[str, Path]) -> Iterator[MakeLLM]:
    """Engines for one test, whose memory is given back at its end. The first argument is a kind of model or a folder."""
    made: list[LLM] = []

    def make(model: str | Path, **options: Any) -> LLM:
        folder = folders[model] if isinstance(model, str) else model
        made.append(LLM(str(folder), **{**OPTIONS, "device": device, **options}))
        return made[-1]

    yield make
    while made:
        made.pop().shutdown()
    release(device)


@pytest.fixture(scope="session")
def cases() -> list[Case]:
    """Forty greedy requests of different lengths."""
    return greedy_cases(40)


@pytest.fixture(scope="session")
def on_cpu(folders: dict[str, Path], cases: list[Case]) -> Callable[[str], list[Outcome]]:
    """Kind of model -> what the CPU says to `cases` in float32, one request after the other."""
    known: dict[str, list[Outcome]] = {}

    def expected(kind: str) -> list[Outcome]:
        if kind not in known:
            with LLM(str(folders[kind]), **{**OPTIONS, "device": "cpu", "dtype": "float32", "threads": 1}) as llm:
                known[kind] = [run(llm, [case])[0] for case in cases]
        return known[kind]

    return expected


def release(device: str) -> None:
    """Give back what ended engines held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
