"""The import contracts fail when they should: a copy of a small house with one wrong import."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (
    "server cli engine worker sample models weights layers attention cache quant grammar kernels schedule text hub hardware native "
    "parallel config core errors"
).split()


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter with the repository's contracts on the package in `folder`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    lines = ["[importlinter]", "root_package = samovar", "include_external_packages = True"]
    for index, contract in enumerate(settings["contracts"]):
        lines.append(f"[importlinter:contract:{index}]")
        for key, value in contract.items():
            lines.append(f"{key} = " + ("\n    ".join(["", *value]) if isinstance(value, list) else str(value)))
    (folder / ".importlinter").write_text("\n".join(lines) + "\n")
    # An editable installation finds the repository's package before the one in `folder`.
    code = (
        "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in type(f).__module__];"
        "from importlinter.cli import lint_imports_command as c; c()"
    )
    words = [sys.executable, "-c", code, "--config", ".importlinter", "--no-cache"]
    return subprocess.run(
        words, cwd=folder, capture_output=True, text=True, check=False, env={"PYTHONPATH": str(folder), "PATH": ""}
    )


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for room in ROOMS:
        (tmp_path / "samovar" / room).mkdir(parents=True)
        (tmp_path / "samovar" / room / "__init__.py").write_text("")
    (tmp_path / "samovar" / "__init__.py").write_text("")
    return tmp_path


def write(house: Path, room: str, text: str) -> None:
    (house / "samovar" / room / "a.py").write_text(text)


def test_the_empty_house_stands(house: Path) -> None:
    done = lint(house)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("room", "target"),
    [
        ("core", "config"),
        ("schedule", "worker"),
        ("text", "hub"),
        ("models", "weights"),
        ("models", "quant"),
        ("server", "cli"),
        ("kernels", "quant"),
        ("sample", "engine"),
        ("config", "hardware"),
    ],
)
def test_an_import_inside_a_function_counts(house: Path, room: str, target: str) -> None:
    write(house, target, "X = 1\n")
    write(house, room, f"def f():\n    from samovar.{target} import a\n    return a\n")
    done = lint(house)
    assert done.returncode == 1 and f"samovar.{room}.a -> samovar.{target}" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("room", "module"), [("schedule", "numpy"), ("core", "torch"), ("config", "torch")])
def test_libraries_stay_out(house: Path, room: str, module: str) -> None:
    write(house, room, f"import {module}\n")
    assert lint(house).returncode == 1


def test_quant_may_use_kernels(house: Path) -> None:
    write(house, "kernels", "X = 1\n")
    write(house, "quant", "from samovar.kernels import a\n")
    assert lint(house).returncode == 0
