"""Figures of repeated measurements: mean, median, deviation, percentiles, under the names that other tools use."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from samovar.errors import ConfigError

PERCENTS = (10, 25, 50, 75, 90, 99)
"""Percentiles of measurements in seconds."""


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as numpy does it by default; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    at = (len(ordered) - 1) * percent / 100
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def label(percent: float) -> str:
    """99.0 -> "p99", 99.9 -> "p99.9"."""
    return f"p{percent:g}"


def spread(name: str, seconds: Sequence[float], percents: Sequence[float]) -> dict[str, float]:
    """`mean_ttft_ms`, `median_ttft_ms`, `std_ttft_ms`, `p99_ttft_ms` ... of times in seconds; zeros of nothing."""
    times = [1000 * value for value in seconds] or [0.0]
    figures = {
        f"mean_{name}_ms": statistics.fmean(times),
        f"median_{name}_ms": statistics.median(times),
        f"std_{name}_ms": statistics.pstdev(times),
    }
    return figures | {f"{label(p)}_{name}_ms": percentile(times, p) for p in percents}


def parse_percents(text: str) -> list[float]:
    """ "50,99" -> [50.0, 99.0]. Raises `ConfigError`."""
    try:
        percents = [float(part) for part in text.split(",") if part]
    except ValueError:
        percents = [-1.0]
    if not all(0 <= p <= 100 for p in percents):
        raise ConfigError(f"--metric-percentiles must be numbers in 0..100 with commas between, got {text!r}")
    return percents


def save(path: str | None, result: dict[str, Any]) -> None:
    """Write a result as JSON, if a place was named."""
    if path is None:
        return
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from error
    print(f"written to {path}")
