"""Measures how fast many prompts are worked through in this process, all given at once."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from samovar.cli.bench.circumstances import Circumstances, described
from samovar.cli.bench.dataset import DatasetOptions, mixed_requests, samples
from samovar.cli.bench.figures import save
from samovar.cli.bench.offline import GenerationOptions, fixed_length, make_llm, random_prompts
from samovar.cli.connection import ENGINE_OPTIONS
from samovar.cli.output import table
from samovar.config.field import Group, field
from samovar.config.groups import SourceConfig
from samovar.config.load import Settings
from samovar.errors import ConfigError

if TYPE_CHECKING:
    from samovar.engine.llm import LLM

Asked = list[tuple[list[int], int]]
"""(prompt ids, tokens to generate) of every request."""

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


OPTIONS = (ThroughputOptions, GenerationOptions, DatasetOptions, SourceConfig, *ENGINE_OPTIONS)


def run(settings: Settings) -> int:
    """Load, warm up, work through everything, print."""
    options, generation = settings[ThroughputOptions], settings[GenerationOptions]
    if settings.engine.model.skip_tokenizer_init and settings[DatasetOptions].dataset_name not in ("random", "mixed"):
        raise ConfigError("--dataset-name sharegpt and custom are texts: leave out --skip-tokenizer-init")
    about, seed = Circumstances(settings), settings.engine.model.seed
    with make_llm(settings) as llm:
        chosen = asked(llm, settings, seed)
        if options.num_warmups:
            warm = [ids for ids, _ in asked(llm, settings, seed + 1)[: options.num_warmups]]
            llm.generate(warm, fixed_length(8, 1, generation), use_tqdm=False)
        prompts = [ids for ids, _ in chosen]
        params = [fixed_length(output_len, options.n, generation) for _, output_len in chosen]
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=True)
        seconds = time.perf_counter() - began
        found = about.of(llm.info)
    output_tokens = sum(len(choice.token_ids) for output in outputs for choice in output.outputs)
    figures = result(len(prompts), sum(map(len, prompts)), output_tokens, seconds)
    print(report(figures))
    print(described(found))
    save(options.output_json, figures | {"circumstances": found})
    return 0


def asked(llm: LLM, settings: Settings, seed: int) -> Asked:
    """The requests of a run as token ids: those of the texts, or random ones where nothing can tokenize."""
    options = settings[DatasetOptions]
    if options.dataset_name == "mixed":
        return mixed_requests(options, llm.info.vocab_size, seed)
    chosen = samples(options, seed)
    if settings.engine.model.skip_tokenizer_init:
        made = random_prompts([sample.num_tokens for sample in chosen], llm.info.vocab_size, seed)
        # What samples share as words they share as ids.
        prompts = [made[0][: options.prefix_len] + ids[options.prefix_len :] for ids in made]
    else:
        prompts = [llm.get_tokenizer().encode(sample.text)[: sample.num_tokens] for sample in chosen]
    return [(ids, sample.output_len) for ids, sample in zip(prompts, chosen, strict=True)]


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
