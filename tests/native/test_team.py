"""The team: every chunk runs once and in its phase, nobody is waited for who has no chunk, and refusals name the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.native.team_program import SCENARIOS, build, run


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """team_stress.cpp, compiled once."""
    return build(tmp_path_factory.mktemp("team"), "-O1")


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(program: Path, scenario: str, threads: int) -> None:
    run(program, scenario, threads)
