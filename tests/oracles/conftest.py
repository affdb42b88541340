"""The cases, and the plainest way to run them: alone, one step at a time, nothing cached."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from samovar import LLM
from tests.oracles.workload import OPTIONS, Case, Expectation, growing_cases, random_cases

SIZES = [60, pytest.param(300, marks=pytest.mark.slow)]


@pytest.fixture(scope="session", params=SIZES)
def cases(request: pytest.FixtureRequest) -> list[Case]:
    """Requests of every kind."""
    return random_cases(request.param)


@pytest.fixture(scope="session", params=[30, pytest.param(300, marks=pytest.mark.slow)])
def growing(request: pytest.FixtureRequest) -> list[Case]:
    """Short prompts and long outputs: what makes running sequences take each other's blocks."""
    return growing_cases(request.param)


@pytest.fixture
def make_llm(tiny_model: Path) -> Iterator[Callable[..., LLM]]:
    """LLMs of the tiny model with some settings changed; shut down after the test."""
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(LLM(str(tiny_model), **{**OPTIONS, **options}))


@pytest.fixture(scope="session")
def plain_llm(tiny_model: Path) -> Iterator[LLM]:
    """The plainest engine: no overlap, no prefix cache, whole prompts, room for everything."""
    options: dict[str, Any] = {**OPTIONS, "async_scheduling": False, "enable_prefix_caching": False}
    with LLM(str(tiny_model), **options) as llm:
        yield llm


@pytest.fixture(scope="session")
def plain(plain_llm: LLM, cases: list[Case]) -> Expectation:
    """What each case gives alone in the plainest engine."""
    return Expectation(plain_llm, cases)


@pytest.fixture(scope="session")
def plain_growing(plain_llm: LLM, growing: list[Case]) -> Expectation:
    """The same for the growing ones."""
    return Expectation(plain_llm, growing)
