"""Measures the way from the command to the first token: a server is started, asked one thing, and stopped.

Cold: the model's files are dropped from the system's page cache before each start. Warm: they stay.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

from samovar.cli.bench.circumstances import Circumstances, described
from samovar.cli.bench.figures import PERCENTS, percentile, save
from samovar.cli.connection import ENGINE_OPTIONS, Connection, engine_words, model_names
from samovar.cli.described import fetch
from samovar.cli.http_stream import Address
from samovar.cli.local_server import local_server
from samovar.cli.output import ProgressLine, table
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings

USAGE = "samovar bench startup [MODEL] [flags]"
POSITIONAL = "model"


class StartupOptions(Group):
    """How often."""

    num_iters_cold: int = field(default=1, ge=0)
    """Starts with the model's files out of the page cache."""
    num_iters_warmup: int = field(default=1, ge=0)
    """Starts that do not count, before the warm ones."""
    num_iters_warm: int = field(default=3, ge=0)
    """Starts with the files in the page cache."""
    output_json: str | None = field(default=None)
    """File for the figures."""


OPTIONS = (StartupOptions, SourceConfig, *ENGINE_OPTIONS)


def run(settings: Settings) -> int:
    """Start, ask and stop, as often as asked; print the seconds."""
    options = settings[StartupOptions]
    path = fetch(settings.engine.model)
    words = engine_words(settings)
    prompt: str | list[int] = [11, 12, 13, 14] if settings.engine.model.skip_tokenizer_init else "Once upon a time"
    kinds = (
        ["cold"] * options.num_iters_cold + ["warmup"] * options.num_iters_warmup + ["warm"] * options.num_iters_warm
    )
    seen: dict[str, list[tuple[float, float]]] = {"cold": [], "warmup": [], "warm": []}
    with ProgressLine("starts") as progress:
        for index, kind in enumerate(kinds):
            if kind == "cold":
                drop_from_page_cache(path)
            seen[kind].append(start_once(words, prompt))
            progress(index + 1, len(kinds))
    figures = result(seen["cold"], seen["warm"])
    # Only now: declaring the model would warm what the starts are to find cold, and take memory from them.
    found = Circumstances(settings).of()
    print(report(figures))
    print(described(found))
    save(options.output_json, figures | {"circumstances": found})
    return 0


def start_once(words: list[str], prompt: str | list[int]) -> tuple[float, float]:
    """(seconds until ready, seconds until the first token) of one start."""
    began = time.perf_counter()
    with local_server(words) as server:
        ready = time.perf_counter() - began
        address = Address(uds=server.uds, prefix="/v1")
        asyncio.run(_first_token(address, prompt))
        return ready, time.perf_counter() - began


async def _first_token(address: Address, prompt: str | list[int]) -> None:
    model = (await model_names(address, None))[0]
    body = {"prompt": prompt, "max_tokens": 1, "ignore_eos": True}
    async for _ in Connection(address, model, None).stream("/completions", body):
        return


def drop_from_page_cache(path: Path) -> None:
    """Ask the system to forget the files it has in memory; needs no privilege."""
    for file in [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file()):
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def result(cold: list[tuple[float, float]], warm: list[tuple[float, float]]) -> dict[str, Any]:
    """Seconds of every start and their spread, to ready and to the first token."""
    figures: dict[str, Any] = {}
    for kind, pairs in (("cold", cold), ("warm", warm)):
        if not pairs:
            continue
        for name, times in (("startup", [p[0] for p in pairs]), ("first_token", [p[1] for p in pairs])):
            figures[f"avg_{kind}_{name}_time"] = statistics.fmean(times)
            figures[f"{kind}_{name}_times"] = times
            figures[f"{kind}_{name}_percentiles"] = {str(p): percentile(times, p) for p in PERCENTS}
    return figures


def report(figures: dict[str, Any]) -> str:
    """The figures for people."""
    rows = []
    for kind in ("cold", "warm"):
        if f"avg_{kind}_startup_time" in figures:
            count = len(figures[f"{kind}_startup_times"])
            ready, first = figures[f"avg_{kind}_startup_time"], figures[f"avg_{kind}_first_token_time"]
            rows.append((kind, f"ready after {ready:.2f} s, first token after {first:.2f} s (mean of {count})"))
    return table(rows, indent="")
