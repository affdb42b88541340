"""Measures how fast many prompts are worked through in this process, all given at once."""

from __future__ import annotations

import time
from typing import Any

from samovar.cli.bench.dataset import DatasetOptions, samples
from samovar.cli.bench.figures import save
from samovar.cli.bench.offline import fixed_length, make_llm
from samovar.cli.connection import ENGINE_OPTIONS
from samovar.cli.output import table
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings

USAGE = "samovar bench throughput [MODEL] [flags]"
POSITIONAL = "model"


class ThroughputOptions(Group):
    """The run."""

    n: int = field(default=1, ge=1)
    """Answers for each prompt."""
    num_warmups: int = field(default=1, ge=0)
    """Prompts worked through before the clock counts."""
    output_json: str | None = field(default=None)
    """File for the figures."""


OPTIONS = (ThroughputOptions, DatasetOptions, SourceConfig, *ENGINE_OPTIONS)


def run(settings: Settings) -> int:
    """Load, warm up, work through everything, print."""
    options = settings[ThroughputOptions]
    chosen = samples(settings[DatasetOptions], settings.engine.model.seed)
    with make_llm(settings) as llm:
        prompts = [llm.get_tokenizer().encode(sample.text)[: sample.num_tokens] for sample in chosen]
        params = [fixed_length(sample.output_len, options.n) for sample in chosen]
        if options.num_warmups:
            warm = samples(settings[DatasetOptions], settings.engine.model.seed + 1)[: options.num_warmups]
            llm.generate([sample.text for sample in warm], fixed_length(8, 1), use_tqdm=False)
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=True)
        seconds = time.perf_counter() - began
    output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    figures = result(len(prompts), sum(map(len, prompts)), output_tokens, seconds)
    print(report(figures))
    save(options.output_json, figures)
    return 0


def result(num_requests: int, prompt_tokens: int, output_tokens: int, seconds: float) -> dict[str, Any]:
    """The figures; the first five under vLLM's names."""
    return {
        "elapsed_time": seconds,
        "num_requests": num_requests,
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": num_requests / seconds,
        "tokens_per_second": (prompt_tokens + output_tokens) / seconds,
        "total_output_tokens": output_tokens,
        "output_tokens_per_second": output_tokens / seconds,
    }


def report(figures: dict[str, Any]) -> str:
    """The figures for people."""
    prompt_tokens = figures["total_num_tokens"] - figures["total_output_tokens"]
    rows = [
        (
            "requests",
            f"{figures['num_requests']} in {figures['elapsed_time']:.2f} s, {figures['requests_per_second']:.2f}/s",
        ),
        ("tokens", f"{prompt_tokens:,} in, {figures['total_output_tokens']:,} out"),
        (
            "throughput",
            f"{figures['output_tokens_per_second']:.1f} tokens/s out, {figures['tokens_per_second']:.1f} in all",
        ),
    ]
    return table(rows, indent="")
