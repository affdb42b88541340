"""Perplexity of a model on a fixed text; with --against also the ratio to another model's, token by token."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from samovar.cli.bench.circumstances import described
from samovar.cli.connection import ENGINE_OPTIONS
from samovar.cli.eval.opened import FACTS_HEADER, AgainstOptions, Facts, facts_of, opened, runs_of
from samovar.cli.eval.report import interval, plain, title
from samovar.cli.eval.scoring import score
from samovar.cli.eval.statistics import Interval, mean_interval
from samovar.cli.eval.windows import TextOptions, Windows, read_text, windows_of
from samovar.cli.output import table
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings
from samovar.errors import SamovarError

USAGE = "samovar eval ppl [MODEL] [--against MODEL] [flags]"
POSITIONAL = "model"
OPTIONS = (AgainstOptions, TextOptions, SourceConfig, *ENGINE_OPTIONS)

Scores = NDArray[np.float64]
"""Log-probabilities [windows, rows]."""


def run(settings: Settings) -> int:
    """Score one model, or two one after the other, and print."""
    options, text = settings[AgainstOptions], read_text(settings[TextOptions])
    runs = runs_of(settings)
    found: list[tuple[Facts, Windows, Scores]] = []
    for name, flags in runs:
        with opened(flags) as llm:
            windows = windows_of(llm, text, settings[TextOptions])
            found.append((facts_of(llm, name), windows, score(llm, windows, name)))
    if len(found) == 2 and found[0][1].ids != found[1][1].ids:
        raise SamovarError(
            f"{runs[0][0]} and {runs[1][0]} cut the text into other tokens: their perplexities say nothing"
        )
    figures = [perplexity(scores) | {"model": facts.plain()} for facts, _, scores in found]
    windows = found[0][1]
    result: dict[str, Any] = {"windows": len(windows.ids), "context": windows.context, "models": figures}
    if len(found) == 2:
        result["ratio"] = ratio(found[0][2], found[1][2])
    print(json.dumps(plain(result), indent=2) if options.json else report(result, [facts for facts, _, _ in found]))
    return 0


def perplexity(scores: Scores) -> dict[str, Any]:
    """exp of the mean negative log-probability, with its interval."""
    return {"perplexity": math.exp(-scores.mean()), "interval": _exp(mean_interval(-scores))}


def ratio(scores: Scores, reference: Scores) -> dict[str, Any]:
    """Perplexity divided by the reference's. The interval is that of differences on the same tokens, far narrower."""
    lost = reference - scores
    return {"value": math.exp(lost.mean()), "interval": _exp(mean_interval(lost))}


def _exp(interval: Interval) -> Interval:
    return math.exp(interval[0]), math.exp(interval[1])


def report(result: dict[str, Any], facts: list[Facts]) -> str:
    """For people."""
    rows = [["model", "perplexity", "95 % interval", *FACTS_HEADER]]
    rows += [
        [one.name, f"{figures['perplexity']:.4f}", interval(figures["interval"]), *one.cells()]
        for one, figures in zip(facts, result["models"], strict=True)
    ]
    lines = [title(result), table(rows, right=range(1, len(rows[0])), indent="")]
    if "ratio" in result:
        of = result["ratio"]
        lines.append(f"ratio on the same tokens: {of['value']:.5f}, {interval(of['interval'], '.5f')}")
    return "\n".join([*lines, described(facts[0].circumstances)])
