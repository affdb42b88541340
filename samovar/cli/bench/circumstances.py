"""What a figure is worth nothing without: versions, commit, device, routes, decisions and memory of the run behind it."""

from __future__ import annotations

import dataclasses
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samovar import __version__
from samovar.cli.described import declare, look_up
from samovar.cli.output import size, table
from samovar.config.load import Settings
from samovar.hardware.device import memory_reading

if TYPE_CHECKING:
    from samovar.core.outputs import EngineInfo

LIBRARIES = ("torch", "triton", "numpy")
ROOT = Path(__file__).resolve().parents[3]
"""Where the package lies; a repository if it was not installed from a wheel."""
CHOSEN = ": chosen"
"""How a route says that a candidate was taken."""


class Circumstances:
    """The circumstances of one run. Made before the model is loaded: it declares the model as `samovar routes` does.

    Raises what declaring a model raises: `ConfigError`, `CheckpointError`, `MemoryPlanError`.
    """

    def __init__(self, settings: Settings) -> None:
        found = look_up(settings.engine)
        worker = declare(found)
        self.facts = found.facts
        self.architecture = found.description.architecture
        self.routes = worker.routes()
        self.decisions = found.resolved.as_rows()
        self.plan = worker.memory_plan

    def of(self, info: EngineInfo | None = None) -> dict[str, Any]:
        """All of it as plain values for a JSON file; call it while the engine of `info` is loaded.

        `memory.used` and `memory.most_used` are what this process holds (a GPU: what torch has reserved), in bytes;
        without an engine in this process they are left out.
        """
        memory: dict[str, Any] = {
            "planned": self.plan.total_bytes,
            "budget": self.plan.budget_bytes,
            "lines": dict(self.plan.lines),
        }
        made: dict[str, Any] = software() | {
            "device": self.facts.name,
            "architecture": self.facts.architecture,
            "model_architecture": self.architecture,
            "routes": self.routes,
            "decisions": self.decisions,
        }
        if info is not None:
            memory["used"], memory["most_used"] = memory_reading(self.facts.kind)
            engine = dataclasses.asdict(info)
            memory["lines"] = dict(engine.pop("memory_plan"))
            memory["planned"] = sum(memory["lines"].values())
            made["decisions"] = engine.pop("decisions")
            # An engine that names its own routes knows them better than the declaration does.
            made["routes"] = engine.pop("routes", None) or self.routes
            made["engine"] = engine
        return made | {"memory": memory}


def software() -> dict[str, Any]:
    """Versions of the package and of what it computes with; the commit where the package is in a repository."""
    found: dict[str, Any] = {"samovar": __version__, "commit": commit(), "python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def commit(folder: Path = ROOT) -> str | None:
    """Short hash of the checked-out commit, with "+changes" if files differ from it; None outside a repository."""
    if not (folder / ".git").exists():
        return None
    try:
        head = _git(folder, "rev-parse", "--short", "HEAD")
        return head + ("+changes" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return done.stdout.strip()


def chosen(route: str) -> tuple[str, str]:
    """One line of a route report -> (what is computed, who computes it); the whole answer if nobody was chosen."""
    name, _, answers = route.partition(": ")
    for answer in answers.split(" · "):
        if answer.endswith(CHOSEN):
            return name, answer.removesuffix(CHOSEN)
    return name, answers


def described(found: dict[str, Any]) -> str:
    """The circumstances for people: a handful of lines."""
    libraries = ", ".join(f"{name} {found[name]}" for name in LIBRARIES if found.get(name))
    kinds: dict[str, list[str]] = {}
    for route in found.get("routes", ()):
        name, taken = chosen(route)
        kinds.setdefault(taken, []).append(name)
    rows = [("software", f"samovar {found['samovar']} ({found['commit'] or 'no repository'}), {libraries}")]
    if "device" in found:
        rows.append(("device", f"{found['device']} ({found['architecture']})"))
    rows += [
        ("routes" if index == 0 else "", f"{taken}: {', '.join(names)}")
        for index, (taken, names) in enumerate(kinds.items())
    ]
    if memory := found.get("memory"):
        used = f", in use {size(memory['used'])}, at most {size(memory['most_used'])}" if "used" in memory else ""
        rows.append(("memory", f"planned {size(memory['planned'])}{used}"))
    return table(rows, indent="")
