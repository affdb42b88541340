"""Counter, Gauge, Histogram: metrics as plain values, for programs that embed an engine and scrape nothing. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from prometheus_client.samples import Sample

from samovar.engine.metrics import ServingMetrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Counter:
    """A total that never falls. `name` is without the exposition's `_total`."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauge:
    """A value as it is now."""

    name: str
    labels: dict[str, str]
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Histogram:
    """Observations in all, their sum, and upper bound (as text, the last is "+Inf") -> observations up to it."""

    name: str
    labels: dict[str, str]
    count: int
    sum: float
    buckets: dict[str, int]


Metric: TypeAlias = Counter | Gauge | Histogram


def snapshots(metrics: ServingMetrics) -> list[Metric]:
    """Every metric with its labels, under the names that /metrics has."""
    found: list[Metric] = []
    for family in metrics.families():
        if family.type == "histogram":
            found += _histograms(family.name, family.samples)
            continue
        kind = Counter if family.type == "counter" else Gauge
        found += [kind(name=family.name, labels=dict(s.labels), value=s.value) for s in family.samples]
    return found


@dataclass(slots=True)
class _Parts:
    """The samples of one histogram."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def _histograms(name: str, samples: list[Sample]) -> Iterator[Histogram]:
    parts: dict[tuple[tuple[str, str], ...], _Parts] = {}
    for sample in samples:
        labels = tuple((key, value) for key, value in sample.labels.items() if key != "le")
        one = parts.setdefault(labels, _Parts())
        if sample.name == f"{name}_bucket":
            one.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name == f"{name}_count":
            one.count = int(sample.value)
        elif sample.name == f"{name}_sum":
            one.sum = sample.value
    for labels, one in parts.items():
        yield Histogram(name=name, labels=dict(labels), count=one.count, sum=one.sum, buckets=one.buckets)
