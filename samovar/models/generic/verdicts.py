"""What the generic path covers: `verdicts.txt`, one architecture a line, as the test of every one of them found it.

`python -m tests.models.generic.sweep` writes the file. No library is needed to read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

PATH = Path(__file__).with_name("verdicts.txt")


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one architecture: why the generic path refuses it; empty if it passed the test."""

    architecture: str
    refusal: str = ""


@cache
def verdicts() -> dict[str, Verdict]:
    """Every architecture that was tested, by name."""
    found = {}
    for line in PATH.read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            name, _, refusal = line.partition(": ")
            found[name] = Verdict(name, refusal)
    return found


def refusal(architecture: str) -> str | None:
    """Why the generic path does not run `architecture`; None if it does."""
    found = verdicts().get(architecture)
    if found is None:
        return "it was not tested with Transformers"
    return found.refusal or None
