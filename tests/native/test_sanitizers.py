"""The team under ThreadSanitizer, and the kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.native.team_program import ROOT, SCENARIOS, build, compiler, run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """team_stress.cpp with ThreadSanitizer, which makes the program fail at the first race."""
    return build(tmp_path_factory.mktemp("tsan"), "-O1", "-g", "-fsanitize=thread")


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_no_races(program: Path, scenario: str, threads: int) -> None:
    run(program, scenario, threads)


def test_the_kernels_touch_only_their_memory(tmp_path: Path) -> None:
    compiler()
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    sanitizers = "-DSAMOVAR_SANITIZE=address,undefined"
    configure = ["cmake", "-S", str(ROOT), "-B", str(tmp_path), "-DCMAKE_BUILD_TYPE=Release", sanitizers]
    subprocess.run(configure, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", str(tmp_path), "--parallel", "2"], check=True, stdout=subprocess.DEVNULL)
    runtime = subprocess.run(
        [compiler(), "-print-file-name=libasan.so"], check=True, capture_output=True, text=True
    ).stdout.strip()
    env = os.environ | {
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "SAMOVAR_NATIVE_LIBRARY": str(tmp_path / "libsamovar.so"),
    }
    tests = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "tests/native"]
    tests.append("--ignore=tests/native/test_team.py")  # a program of its own, without the library
    done = subprocess.run(tests, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
