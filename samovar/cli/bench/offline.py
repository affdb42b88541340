"""What the offline measurements share: an `LLM` made of a command's settings, and prompts of random token ids."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from samovar.cli.connection import ENGINE_OPTIONS
from samovar.config.load import Settings

if TYPE_CHECKING:
    from samovar.core.sampling_params import SamplingParams
    from samovar.engine.llm import LLM


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


def fixed_length(output_len: int, n: int) -> SamplingParams:
    """Sampling that generates exactly `output_len` tokens."""
    from samovar.core.sampling_params import SamplingParams

    return SamplingParams(n=n, temperature=1.0, max_tokens=output_len, ignore_eos=True, detokenize=True)
