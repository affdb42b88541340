"""Waivers: places that may break a gate, one line each with a reason, so that they can be counted."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tools.source import ROOT, Violation

FILE = ROOT / "tools" / "waivers.txt"


def read_waivers(path: Path = FILE) -> dict[tuple[str, str], str]:
    """(gate, where) -> reason. Raises ValueError for a line without a reason."""
    waivers: dict[tuple[str, str], str] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split(maxsplit=2)
        if len(parts) < 3:
            raise ValueError(f"{path.name}:{number}: a waiver is 'gate path[:name] reason', got {line!r}")
        waivers[(parts[0], parts[1])] = parts[2]
    return waivers


def apply(violations: Sequence[Violation], waivers: dict[tuple[str, str], str]) -> tuple[list[Violation], list[str]]:
    """What is left of the violations, and the waivers that nothing needs any more."""
    left = [v for v in violations if (v.gate, v.where) not in waivers]
    used = {(v.gate, v.where) for v in violations}
    return left, [f"{gate} {where}" for gate, where in waivers if (gate, where) not in used]
