"""startup_report: what the engine is about to take and to do, in a screenful, logged before a weight is read."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import samovar
from samovar.config.description import ModelDescription
from samovar.config.engine import ENGINE_GROUPS, EngineConfig
from samovar.config.resolve import Resolved
from samovar.core.device_facts import DeviceFacts
from samovar.hardware.memory import MemoryPlan

MIB = 1 << 20


def startup_report(
    description: ModelDescription, facts: DeviceFacts, resolved: Resolved, memory_plan: MemoryPlan
) -> str:
    """Model and device, the memory plan line by line, and every decision with its reason; at most 25 lines."""
    block_size = resolved.config.cache.block_size
    room = (memory_plan.num_blocks - 1) * block_size
    sizes = [(name, _mib(size)) for name, size in memory_plan.lines]
    sizes += [("total", _mib(memory_plan.total_bytes)), ("may be used", _mib(memory_plan.budget_bytes))]
    capacities = " · ".join(f"{kind} {tokens:,}" for kind, tokens in memory_plan.capacities)
    return "\n".join(
        [
            f"memory plan of {description.path.name} ({description.architecture}) on {facts.name}:",
            *_columns(sizes),
            f"  ({memory_plan.explanation}; room for {room:,} tokens, longest sequence {memory_plan.max_model_len:,})",
            f"  (the cache would hold, in tokens: {capacities})",
            "decided:",
            *_columns(resolved.as_rows()),
        ]
    )


def settings_of(config: EngineConfig) -> dict[str, dict[str, Any]]:
    """group -> setting -> value."""
    return {group: dataclasses.asdict(getattr(config, group)) for group in ENGINE_GROUPS}


def versions() -> dict[str, str]:
    """What runs: Python, this package, and the libraries that decide about results and speed."""
    found = {"python": platform.python_version(), "samovar": samovar.__version__}
    for name in ("torch", "triton", "numpy", "tokenizers", "llguidance"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _mib(size: int) -> str:
    return f"{size / MIB:>9,.1f} MiB"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines with every column but the last padded to one width."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)] if rows else []
    return ["  " + "  ".join([*(f"{c:<{w}}" for c, w in zip(row, widths)), row[-1]]) for row in rows]
