"""Measures one fixed batch, again and again, in this process: seconds from prompts to all tokens, and one decode step.

A decode step is the time of the whole run less the time of a run that only computes the prompts, each the fastest of
its kind, divided by the steps between: what a sequence waits for its next token while the batch decodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from samovar.cli.bench.circumstances import Circumstances, described
from samovar.cli.bench.figures import PERCENTS, percentile, save
from samovar.cli.bench.offline import (
    GenerationOptions,
    fixed_length,
    make_llm,
    random_prompts,
    seconds_of,
    whole_numbers,
)
from samovar.cli.connection import ENGINE_OPTIONS
from samovar.cli.output import ProgressLine, table
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings
from samovar.engine.metric_snapshots import Counter

if TYPE_CHECKING:
    from samovar.engine.llm import LLM

USAGE = "samovar bench latency [MODEL] [flags]"
POSITIONAL = "model"


class LatencyOptions(Group):
    """The batch and how often it runs."""

    input_len: int = field(default=32, ge=1)
    """Tokens of each prompt."""
    output_len: int = field(default=128, ge=1)
    """Tokens generated for each prompt."""
    batch_size: list[str] = field(factory=lambda: ["8"])
    """Prompts in the batch; several sizes are measured one after the other."""
    n: int = field(default=1, ge=1)
    """Answers for each prompt."""
    num_iters_warmup: int = field(default=2, ge=0)
    """Runs before the clock counts."""
    num_iters: int = field(default=5, ge=1)
    """Runs that count."""
    output_json: str | None = field(default=None)
    """File for the figures."""


OPTIONS = (LatencyOptions, GenerationOptions, SourceConfig, *ENGINE_OPTIONS)


def run(settings: Settings) -> int:
    """Load, warm up, measure, print."""
    options = settings[LatencyOptions]
    sizes = whole_numbers("--batch-size", options.batch_size)
    about = Circumstances(settings)
    with make_llm(settings) as llm:
        batches = [measure(llm, size, options, settings[GenerationOptions]) for size in sizes]
        found = about.of(llm.info)
    print(report(batches))
    print(described(found))
    save(options.output_json, {**batches[0], "batches": batches, "circumstances": found})
    return 0


def measure(llm: LLM, batch_size: int, options: LatencyOptions, generation: GenerationOptions) -> dict[str, Any]:
    """The figures of one batch size."""
    whole = fixed_length(options.output_len, options.n, generation)
    first = fixed_length(1, options.n, generation)
    lengths = [options.input_len] * batch_size
    prefills, times = [], []
    steps = host = 0.0
    rounds = options.num_iters_warmup + options.num_iters
    with ProgressLine(f"runs of {batch_size}") as progress:
        for index in range(rounds):
            # New prompts each time: equal ones would come from the prefix cache.
            before, after = (random_prompts(lengths, llm.info.vocab_size, 2 * index + k) for k in (0, 1))
            prefills.append(seconds_of(llm, before, first))
            counted = host_work(llm)
            times.append(seconds_of(llm, after, whole))
            if index >= options.num_iters_warmup:
                steps, host = (sum_ + new - old for sum_, new, old in zip((steps, host), host_work(llm), counted))
            progress(index + 1, rounds)
    sizes = {"batch_size": batch_size, "input_len": options.input_len, "output_len": options.output_len, "n": options.n}
    skipped = options.num_iters_warmup
    figures = sizes | result(times[skipped:]) | decode_step(times[skipped:], prefills[skipped:], sizes)
    return figures | {"host_ms_per_step": 1000 * host / max(steps, 1)}


def host_work(llm: LLM) -> tuple[float, float]:
    """(steps so far, seconds the engine's thread has worked between them instead of waiting for the device)."""
    values = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}
    return values["samovar:engine_steps"], values["samovar:engine_host_seconds"]


def result(times: list[float]) -> dict[str, Any]:
    """The figures under vLLM's names; seconds."""
    return {
        "avg_latency": statistics.fmean(times),
        "latencies": times,
        "percentiles": {str(percent): percentile(times, percent) for percent in PERCENTS},
    }


def decode_step(times: list[float], prefills: list[float], sizes: dict[str, int]) -> dict[str, Any]:
    """One decode step of the whole batch from the fastest whole run and the fastest prefill; milliseconds.

    Without a second token there is no step, and its figures are left out.
    """
    found: dict[str, Any] = {"prefill_latencies": prefills, "prefill_ms": 1000 * min(prefills)}
    if sizes["output_len"] > 1:
        step = (min(times) - min(prefills)) / (sizes["output_len"] - 1)
        found["decode_step_ms"] = 1000 * step
        # A step too short for the clock has no rate.
        found["decode_tokens_per_second"] = sizes["batch_size"] * sizes["n"] / step if step > 0 else None
    return found


def report(batches: Sequence[dict[str, Any]]) -> str:
    """The figures for people."""
    one = batches[0]
    head = f"prompts of {one['input_len']} tokens, {one['output_len']} generated for each, {len(one['latencies'])} runs"
    rows = [
        ("batch", "mean s", "median s", "p99 s", "prefill ms", "decode step ms", "tokens/s in decode", "host ms a step")
    ]
    for batch in batches:
        step, rate = batch.get("decode_step_ms"), batch.get("decode_tokens_per_second")
        rows.append(
            (
                str(batch["batch_size"] * batch["n"]),
                f"{batch['avg_latency']:.3f}",
                f"{statistics.median(batch['latencies']):.3f}",
                f"{batch['percentiles']['99']:.3f}",
                f"{batch['prefill_ms']:.2f}",
                "-" if step is None else f"{step:.3f}",
                "-" if rate is None else f"{rate:,.1f}",
                f"{batch['host_ms_per_step']:.3f}",
            )
        )
    return head + "\n" + table(rows, right=range(8), indent="")
