"""The two scripts on machines that lack something: each says what, and none leaves a half-made folder in use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The scripts in a folder of their own."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("pyproject.toml", "constraints.txt", "CMakeLists.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def fake_python(folder: Path, body: str) -> Path:
    """An executable that stands in for an interpreter."""
    path = folder / "fake-python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def run(clone: Path, script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "HOME": str(clone)} | variables
    return subprocess.run(
        ["bash", f"scripts/{script}", *words],
        cwd=clone,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.parametrize("script", ["serve.sh", "test.sh"])
def test_no_python(clone: Path, script: str) -> None:
    done = run(clone, script, PYTHON="no-such-python")
    assert done.returncode == 1 and "no python3 of version 3.11 or newer found" in done.stderr


def test_an_old_python(clone: Path) -> None:
    old = fake_python(clone, 'case "$1" in -V) echo "Python 3.9.1";; *) exit 1;; esac')
    done = run(clone, "serve.sh", PYTHON=str(old))
    assert done.returncode == 1 and "Python 3.9.1, 3.11 or newer is needed" in done.stderr


def test_no_venv_module(clone: Path) -> None:
    bare = fake_python(clone, 'case "$2" in *ensurepip*) exit 1;; *) exit 0;; esac')
    done = run(clone, "serve.sh", PYTHON=str(bare))
    assert done.returncode == 1 and "apt install python3-venv" in done.stderr
    assert not (clone / ".venv").exists()


def installed(clone: Path) -> Path:
    """A clone that looks installed: its samovar prints its words."""
    bin_folder = clone / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(sys.executable)
    command = bin_folder / "samovar"
    command.write_text('#!/bin/sh\necho "$$:$@"\n')
    command.chmod(0o755)
    code = f"cd {clone} && . scripts/setup.sh && fingerprint .venv/bin/python '' > .venv/.installed-base"
    subprocess.run(["bash", "-c", code], check=True)
    return clone


def test_a_failed_installation_is_not_taken_for_one(clone: Path) -> None:
    (installed(clone) / ".venv" / ".installed-base").unlink()
    nothing = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(clone / "none"), "CXX": "no-such-compiler"}
    done = run(clone, "serve.sh", PYTHON=sys.executable, **nothing)
    assert done.returncode == 1 and "needs a network" in done.stderr
    assert not list((clone / ".venv").glob(".installed-*"))


def test_the_second_run_starts_at_once_and_is_the_server_itself(clone: Path) -> None:
    installed(clone)
    words = ["bash", "scripts/serve.sh", "model", "--port", "1"]
    env = {"PATH": os.environ["PATH"], "PYTHON": sys.executable}
    child = subprocess.Popen(words, cwd=clone, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = child.communicate(timeout=30)
    # The same process id: signals reach the server, not a shell around it.
    assert out == f"{child.pid}:serve model --port 1\n" and err == ""


def test_a_changed_constraint_installs_again(clone: Path) -> None:
    installed(clone)
    with (clone / "constraints.txt").open("a") as file:
        file.write("nothing==1\n")
    done = run(clone, "serve.sh", PYTHON=sys.executable, PIP_NO_INDEX="1", PIP_FIND_LINKS=str(clone / "none"))
    assert done.returncode == 1 and "samovar: installing" in done.stderr


def test_ci_is_the_test_script() -> None:
    text = (ROOT / ".ci" / "run").read_text()
    assert "exec bash scripts/test.sh" in text
