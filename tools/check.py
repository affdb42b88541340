"""Runs every gate that takes seconds: ruff, import layers, budgets, habits, docs. CI runs exactly this, then mypy and tests.

python -m tools.check
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

from tools import budgets, configuration_doc, habits, models_doc
from tools.source import ROOT, read_sources
from tools.waivers import apply, read_waivers

COMMANDS = {
    "ruff check": ["ruff", "check", "--quiet", "--output-format", "concise"],
    "ruff format": ["ruff", "format", "--check", "--quiet", "--output-format", "concise"],
    "import layers": ["importlinter.cli", "lint", "--no-logo"],
}


def run_module(words: list[str]) -> str | None:
    """Run a Python module as a command; None if it passed, otherwise what it said."""
    if words[0] == "importlinter.cli":
        program = [sys.executable, "-c", "from importlinter.cli import lint_imports_command; lint_imports_command()"]
    else:
        program = [sys.executable, "-m", *words]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
    return None if done.returncode == 0 else done.stdout + done.stderr


def gates() -> str | None:
    """Budgets and habits, less the waivers."""
    sources = read_sources()
    found = [*budgets.check(sources), *habits.check(sources), *habits.texts()]
    left, unused = apply(found, read_waivers())
    lines = [str(violation) for violation in left] + [f"tools/waivers.txt: nothing needs {line!r}" for line in unused]
    return "\n".join([*lines, f"{len(left)} violations"]) if lines else None


def main() -> int:
    """Run all; the exit code is 1 if any failed."""
    steps: dict[str, Callable[[], str | None]] = {n: partial(run_module, words) for n, words in COMMANDS.items()}
    steps |= {"gates": gates, "docs": configuration_doc.complaint, "models": models_doc.complaint}
    failed = []
    for name, step in steps.items():
        start = time.perf_counter()
        complaint = step()
        print(
            f"{name:<14} {'ok' if complaint is None else 'FAILED':<7} {time.perf_counter() - start:5.1f} s", flush=True
        )
        if complaint is not None:
            failed.append(name)
            print(complaint)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
