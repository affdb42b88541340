"""Measures the time to the first token of one prompt on an idle engine in this process, for prompts of several lengths."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from samovar.cli.bench.circumstances import Circumstances, described
from samovar.cli.bench.figures import save
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
from samovar.errors import ConfigError

if TYPE_CHECKING:
    from samovar.engine.llm import LLM

USAGE = "samovar bench prefill [MODEL] [flags]"
POSITIONAL = "model"


class PrefillOptions(Group):
    """The prompts and how often each length runs."""

    input_len: list[str] = field(factory=lambda: ["2048", "8192", "32768"])
    """Tokens of the prompt; several lengths are measured one after the other."""
    num_iters_warmup: int = field(default=1, ge=0)
    """Prompts of each length before the clock counts."""
    num_iters: int = field(default=3, ge=1)
    """Prompts of each length that count."""
    output_json: str | None = field(default=None)
    """File for the figures."""


OPTIONS = (PrefillOptions, GenerationOptions, SourceConfig, *ENGINE_OPTIONS)


def run(settings: Settings) -> int:
    """Load, measure every length, print."""
    options = settings[PrefillOptions]
    lengths = whole_numbers("--input-len", options.input_len)
    about = Circumstances(settings)
    if max(lengths) >= about.plan.max_model_len:
        raise ConfigError(
            f"--input-len {max(lengths)}: with one token after it that is more than the context of "
            f"{about.plan.max_model_len}; give --input-len shorter ones, or a larger --max-model-len"
        )
    with make_llm(settings) as llm:
        prompts = [measure(llm, length, options, settings[GenerationOptions]) for length in lengths]
        found = about.of(llm.info)
    print(report(prompts))
    print(described(found))
    save(options.output_json, {"prefill": prompts, "circumstances": found})
    return 0


def measure(llm: LLM, length: int, options: PrefillOptions, generation: GenerationOptions) -> dict[str, Any]:
    """The figures of prompts of `length` tokens, each one alone in the engine."""
    params, times = fixed_length(1, 1, generation), []
    rounds = options.num_iters_warmup + options.num_iters
    with ProgressLine(f"prompts of {length}") as progress:
        for index in range(rounds):
            times.append(seconds_of(llm, random_prompts([length], llm.info.vocab_size, index), params))
            progress(index + 1, rounds)
    return result(length, times[options.num_iters_warmup :])


def result(length: int, times: list[float]) -> dict[str, Any]:
    """Median time to the first token and the prompt tokens per second that it means."""
    median = statistics.median(times)
    return {
        "input_len": length,
        "median_ttft_ms": 1000 * median,
        "ttfts": times,
        "tokens_per_second": length / median,
    }


def report(prompts: Sequence[dict[str, Any]]) -> str:
    """The figures for people."""
    rows = [("prompt", "first token ms", "fastest ms", "slowest ms", "tokens/s")]
    for one in prompts:
        rows.append(
            (
                f"{one['input_len']:,}",
                f"{one['median_ttft_ms']:.2f}",
                f"{1000 * min(one['ttfts']):.2f}",
                f"{1000 * max(one['ttfts']):.2f}",
                f"{one['tokens_per_second']:,.0f}",
            )
        )
    return table(rows, right=range(5), indent="")
