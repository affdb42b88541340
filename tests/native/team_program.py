"""Builds team_stress.cpp: the team of the library over operations for tests, plain or under a sanitizer."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from samovar.config.field import variable

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ("team.cpp", "program.cpp", "contention.cpp", "isa.cpp")
SCENARIOS = ("random_runs", "put_aside", "created_and_destroyed", "several_teams", "refusals", "reports")


def compiler() -> str:
    """The C++ compiler; skips the test where there is none."""
    found = next(filter(None, (shutil.which(name) for name in (variable("CXX") or "c++", "g++", "clang++"))), None)
    if found is None:
        pytest.skip("no C++ compiler")
    return found


def build(folder: Path, *flags: str) -> Path:
    """The program in `folder`, compiled with `flags`."""
    sources = [ROOT / "tests" / "native" / "team_stress.cpp", *(ROOT / "native" / name for name in SOURCES)]
    command = [compiler(), "-std=c++20", *flags, f"-I{ROOT / 'native'}", *map(str, sources), "-pthread"]
    subprocess.run([*command, "-o", str(folder / "team_stress")], check=True)
    return folder / "team_stress"


def run(program: Path, scenario: str, threads: int) -> None:
    """Run one scenario; AssertionError with what it printed unless that is "ok"."""
    done = subprocess.run(
        [str(program), scenario, str(threads)], capture_output=True, text=True, check=False, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stdout + done.stderr[-4000:]
