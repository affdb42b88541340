"""What the offline measurements share: an `LLM` made of a command's settings, prompts of random token ids, and a clock."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from samovar.cli.connection import ENGINE_OPTIONS
from samovar.config.field import Group, field
from samovar.config.load import Settings
from samovar.config.parse import parse_integer
from samovar.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from samovar.core.sampling_params import SamplingParams
    from samovar.engine.llm import LLM


class GenerationOptions(Group):
    """How tokens are chosen, and what becomes of them."""

    temperature: float | None = field(default=None, ge=0)
    """Temperature of sampling. Default: 0 (the likeliest token), or 1 where several answers are asked for."""
    detokenize: bool = field(default=False)
    """Turn the tokens into text, too."""


def make_llm(settings: Settings) -> LLM:
    """The model, loaded in this process with the settings that were given."""
    from samovar.cli.described import fetch
    from samovar.engine.llm import LLM

    fetch(settings.engine.model)
    flags: dict[str, Any] = {}
    for group in ENGINE_OPTIONS:
        values = settings[group]
        flags |= {name: getattr(values, name) for name in group.settings if name in settings.given}
    return LLM(flags.pop("model", settings.engine.model.model), **flags)


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of random ids, all different from their first token on, so that no prefix is shared."""
    generator = random.Random(seed)
    return [[generator.randrange(vocab_size) for _ in range(length)] for length in lengths]


def fixed_length(output_len: int, n: int, options: GenerationOptions) -> SamplingParams:
    """Sampling that generates exactly `output_len` tokens."""
    from samovar.core.sampling_params import SamplingParams

    temperature = options.temperature
    if temperature is None:
        temperature = 0.0 if n == 1 else 1.0
    return SamplingParams(
        n=n, temperature=temperature, max_tokens=output_len, ignore_eos=True, detokenize=options.detokenize
    )


def seconds_of(llm: LLM, prompts: list[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> float:
    """How long `llm` takes for all of them."""
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def whole_numbers(flag: str, texts: list[str]) -> list[int]:
    """["1", "32", "2k"] or ["1,32"] -> numbers of at least 1. Raises `ConfigError`."""
    numbers = []
    for text in (part for item in texts for part in item.replace(",", " ").split()):
        try:
            numbers.append(parse_integer(text))
        except ValueError:
            numbers.append(0)
        if numbers[-1] < 1:
            raise ConfigError(f"{flag} must be whole numbers from 1 on, got {text!r}")
    if not numbers:
        raise ConfigError(f"{flag} needs at least one number")
    return numbers
