"""Prompts for measurements: random ones of a given length, or a file of real ones. The same seed gives the same prompts."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samovar.config.field import Group, field
from samovar.errors import ConfigError

WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information"
).split()
"""Words that most tokenizers know as one token with the space before them."""


class DatasetOptions(Group):
    """What is asked."""

    dataset_name: str = field(default="random", choices=("random", "mixed", "sharegpt", "custom"))
    """random: words, all of about the same length; mixed: prompts and answers of any length between two; a ShareGPT
    file; or a JSONL file with "prompt" and optionally "output_tokens" on each line."""
    dataset_path: str | None = field(default=None)
    """File of the sharegpt or custom dataset."""
    num_prompts: int = field(default=100, ge=1)
    """How many prompts."""
    input_len: int = field(default=256, ge=1, flags=("--random-input-len",))
    """Tokens of a random prompt."""
    output_len: int = field(default=128, ge=1, flags=("--random-output-len",))
    """Tokens to generate for each prompt."""
    range_ratio: float = field(default=0.0, ge=0, le=0.99, flags=("--random-range-ratio",))
    """Both lengths vary by this part around their value; 0.5 means from half to one and a half."""
    prefix_len: int = field(default=0, ge=0, flags=("--random-prefix-len",))
    """Tokens that all random prompts begin with, on top of their length."""
    mixed_min_len: int = field(default=100, ge=1)
    """Fewest tokens of a mixed prompt, and of its answer."""
    mixed_max_len: int = field(default=1024, ge=1)
    """Most tokens of a mixed prompt, and of its answer."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt. `words` stands in for tokens where nothing can tokenize; files have only text."""

    text: str
    num_tokens: int
    output_len: int


def samples(options: DatasetOptions, seed: int) -> list[Sample]:
    """The prompts of a run. Raises `ConfigError` for a file that is missing or not of its kind."""
    if options.dataset_name == "random":
        return _random(options, random.Random(seed))
    if options.dataset_name == "mixed":
        generator = random.Random(seed)
        return [_words(generator, *_mixed_lengths(options, generator)) for _ in range(options.num_prompts)]
    if options.dataset_path is None:
        raise ConfigError(f"--dataset-name {options.dataset_name} needs --dataset-path")
    try:
        text = Path(options.dataset_path).read_text(encoding="utf-8")
        found = _sharegpt(text, options) if options.dataset_name == "sharegpt" else _custom(text, options)
    except OSError as error:
        raise ConfigError(
            f"--dataset-path {options.dataset_path}: cannot be read: {error.strerror or error}"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--dataset-path {options.dataset_path}: not a {options.dataset_name} file ({error})"
        ) from error
    if not found:
        raise ConfigError(f"--dataset-path {options.dataset_path}: holds no usable prompt")
    random.Random(seed).shuffle(found)
    return [found[i % len(found)] for i in range(options.num_prompts)]


def _random(options: DatasetOptions, generator: random.Random) -> list[Sample]:
    def vary(length: int) -> int:
        spare = int(length * options.range_ratio)
        return max(1, generator.randint(length - spare, length + spare))

    prefix = generator.choices(WORDS, k=options.prefix_len)
    made = []
    for _ in range(options.num_prompts):
        words = prefix + generator.choices(WORDS, k=vary(options.input_len))
        made.append(Sample(" ".join(words), len(words), vary(options.output_len)))
    return made


def mixed_requests(options: DatasetOptions, vocab_size: int, seed: int) -> list[tuple[list[int], int]]:
    """(prompt ids, tokens to generate): lengths uniform between the two bounds. What a seed gives depends on nothing but
    the arguments, so that engines are compared over equal work. Raises `ConfigError`."""
    generator, made = random.Random(seed), []
    low, high = _mixed_bounds(options)
    for _ in range(options.num_prompts):
        length = generator.randint(low, high)
        # The first ids are special in most vocabularies.
        ids = [generator.randrange(min(10, vocab_size - 1), vocab_size) for _ in range(length)]
        made.append((ids, generator.randint(low, high)))
    return made


def _mixed_bounds(options: DatasetOptions) -> tuple[int, int]:
    low, high = options.mixed_min_len, options.mixed_max_len
    if low > high:
        raise ConfigError(f"--mixed-min-len {low} is more than --mixed-max-len {high}")
    return low, high


def _mixed_lengths(options: DatasetOptions, generator: random.Random) -> tuple[int, int]:
    low, high = _mixed_bounds(options)
    return generator.randint(low, high), generator.randint(low, high)


def _words(generator: random.Random, length: int, output_len: int) -> Sample:
    return Sample(" ".join(generator.choices(WORDS, k=length)), length, output_len)


def _sharegpt(text: str, options: DatasetOptions) -> list[Sample]:
    """The first question of every conversation that has an answer."""
    found = []
    for entry in json.loads(text):
        turns: list[dict[str, Any]] = entry.get("conversations") or entry.get("conversation") or []
        if len(turns) >= 2 and turns[0].get("value"):
            question = turns[0]["value"]
            found.append(Sample(question, len(question.split()), options.output_len))
    return found


def _custom(text: str, options: DatasetOptions) -> list[Sample]:
    found = []
    for line in text.splitlines():
        if line.strip():
            entry = json.loads(line)
            prompt = entry["prompt"]
            found.append(Sample(prompt, len(prompt.split()), int(entry.get("output_tokens") or options.output_len)))
    return found
