"""Measures one fixed batch, again and again, in this process: seconds from prompts to all tokens."""

from __future__ import annotations

import statistics
import time
from typing import Any

from samovar.cli.bench.figures import PERCENTS, percentile, save
from samovar.cli.bench.offline import fixed_length, make_llm, random_prompts
from samovar.cli.connection import ENGINE_OPTIONS
from samovar.cli.output import ProgressLine, table
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings

USAGE = "samovar bench latency [MODEL] [flags]"
POSITIONAL = "model"


class LatencyOptions(Group):
    """The batch and how often it runs."""

    input_len: int = field(default=32, ge=1)
    """Tokens of each prompt."""
    output_len: int = field(default=128, ge=1)
    """Tokens generated for each prompt."""
    batch_size: int = field(default=8, ge=1)
    """Prompts in the batch."""
    n: int = field(default=1, ge=1)
    """Answers for each prompt."""
    num_iters_warmup: int = field(default=2, ge=0)
    """Runs before the clock counts."""
    num_iters: int = field(default=5, ge=1)
    """Runs that count."""
    output_json: str | None = field(default=None)
    """File for the figures."""


OPTIONS = (LatencyOptions, SourceConfig, *ENGINE_OPTIONS)


def run(settings: Settings) -> int:
    """Load, warm up, measure, print."""
    options = settings[LatencyOptions]
    with make_llm(settings) as llm:
        params = fixed_length(options.output_len, options.n)
        lengths, times = [options.input_len] * options.batch_size, []
        rounds = options.num_iters_warmup + options.num_iters
        with ProgressLine("runs") as progress:
            for index in range(rounds):
                # New prompts each time: equal ones would come from the prefix cache.
                prompts = random_prompts(lengths, llm.info.vocab_size, seed=index)
                began = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                times.append(time.perf_counter() - began)
                progress(index + 1, rounds)
    measured = times[options.num_iters_warmup :]
    print(report(measured, options))
    save(options.output_json, result(measured))
    return 0


def result(times: list[float]) -> dict[str, Any]:
    """The figures under vLLM's names; seconds."""
    return {
        "avg_latency": statistics.fmean(times),
        "latencies": times,
        "percentiles": {str(percent): percentile(times, percent) for percent in PERCENTS},
    }


def report(times: list[float], options: LatencyOptions) -> str:
    """The figures for people."""
    average = statistics.fmean(times)
    tokens = options.batch_size * options.n * options.output_len
    rows = [
        (
            "batch",
            f"{options.batch_size} prompts of {options.input_len} tokens, {options.output_len} generated for each",
        ),
        ("latency", f"mean {average:.3f} s, median {statistics.median(times):.3f} s over {len(times)} runs"),
        ("percentiles", "  ".join(f"p{percent} {percentile(times, percent):.3f}" for percent in PERCENTS) + " s"),
        ("per token", f"{1000 * average / options.output_len:.2f} ms a step, {tokens / average:.1f} tokens/s"),
    ]
    return table(rows, indent="")
