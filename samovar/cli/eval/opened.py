"""The models of an evaluation: the one that is named, and the one it is compared with; one in memory at a time."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samovar.cli.bench.circumstances import software
from samovar.cli.connection import ENGINE_OPTIONS
from samovar.cli.described import fetch
from samovar.cli.output import size
from samovar.config.field import Group, field
from samovar.config.load import Settings
from samovar.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from samovar.engine.llm import LLM

FORMS = ("dtype", "quantization", "kv_cache_dtype")
"""Settings that say in which numbers a model computes: what an evaluation compares."""
ABOUT_FILES = ("tokenizer", "revision", "tokenizer_revision", "load_format", "hf_overrides")
"""Settings that speak of one model's files, and not of another's."""
DECODE_TOKENS = 32
"""Tokens generated to measure the speed of a single stream."""


class AgainstOptions(Group):
    """What it is compared with."""

    against: str | None = field(default=None)
    """Model to compare with, or the same model again: it gets the other flags, but none of --dtype, --quantization and
    --kv-cache-dtype."""
    against_dtype: str = field(default="auto", choices=("auto", "float32", "bfloat16", "float16"))
    """--dtype of the model to compare with."""
    json: bool = field(default=False)
    """Print one JSON object instead of tables."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a model takes and how fast it is here: bytes of its weights, tokens its cache has room for, tokens a second of
    one stream (a short run: for orders of magnitude)."""

    name: str
    dtype: str
    kv_cache_dtype: str
    weight_bytes: int
    cache_tokens: int
    cache_bytes: int
    decode_tokens_per_second: float
    circumstances: dict[str, Any]

    def cells(self) -> list[str]:
        """Weights, bytes of cache for a token, and speed, for a table."""
        each = self.cache_bytes / max(1, self.cache_tokens)
        return [size(self.weight_bytes), f"{each:,.0f} B", f"{self.decode_tokens_per_second:.1f}"]

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


FACTS_HEADER = ["weights", "K/V of a token", "tokens/s"]


def changed_forms(settings: Settings) -> list[str]:
    """The flags given that say in which numbers the model computes, as they were written."""
    model, cache = settings.engine.model, settings.engine.cache
    values = {"dtype": model.dtype, "quantization": model.quantization, "kv_cache_dtype": cache.kv_cache_dtype}
    return [f"--{name.replace('_', '-')} {values[name]}" for name in FORMS if name in settings.given]


def label(settings: Settings) -> str:
    """How a table calls the model that is evaluated."""
    return " ".join([Path(settings.engine.model.model).name, *changed_forms(settings)])


def flags_of(settings: Settings) -> dict[str, Any]:
    """The flags of the model that is evaluated."""
    flags: dict[str, Any] = {"model": settings.engine.model.model}
    for group in ENGINE_OPTIONS:
        values = settings[group]
        flags |= {name: getattr(values, name) for name in group.settings if name in settings.given}
    return flags


def reference_flags(settings: Settings) -> tuple[str, dict[str, Any]]:
    """The name and the flags of the model to compare with: --against, or else the model in its own form.

    Raises `ConfigError` where that would compare a model with itself.
    """
    options, flags = settings[AgainstOptions], flags_of(settings)
    if options.against is None and not changed_forms(settings):
        raise ConfigError(
            "nothing to compare: name another model with --against, or give --quantization or another form of this one"
        )
    named = options.against or flags["model"]
    left_out = FORMS if named == flags["model"] else (*FORMS, *ABOUT_FILES)
    kept = {name: value for name, value in flags.items() if name not in left_out}
    form = "" if options.against_dtype == "auto" else f" --dtype {options.against_dtype}"
    return Path(named).name + form, kept | {"model": named, "dtype": options.against_dtype}


def runs_of(settings: Settings) -> list[tuple[str, dict[str, Any]]]:
    """Name and flags of every model that is asked for: one, or two with --against."""
    first = (label(settings), flags_of(settings))
    return [first] if settings[AgainstOptions].against is None else [first, reference_flags(settings)]


@contextmanager
def opened(flags: dict[str, Any]) -> Iterator[LLM]:
    """The model, loaded in this process; gone at the end. Raises what loading a model raises."""
    from samovar.engine.engine_args import engine_config
    from samovar.engine.llm import LLM

    config = engine_config(flags)
    if config.model.skip_tokenizer_init:
        raise ConfigError("--skip-tokenizer-init: an evaluation needs the tokenizer; leave it out")
    fetch(config.model)
    with LLM(**flags) as llm:
        yield llm


def circumstances(llm: LLM) -> dict[str, Any]:
    """What the figures of a loaded model depend on besides its files: versions, routes, decisions."""
    return software() | {"routes": llm.info.routes, "decisions": llm.info.decisions}


def facts_of(llm: LLM, name: str) -> Facts:
    """What a loaded model takes, and the speed of one stream, measured on `DECODE_TOKENS` tokens."""
    from samovar.core.sampling_params import SamplingParams

    prompt = llm.get_tokenizer().encode("The history of the town begins with a river.")

    def seconds(count: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        began = time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        return time.perf_counter() - began

    seconds(2)
    speed = (DECODE_TOKENS - 2) / max(1e-9, seconds(DECODE_TOKENS) - seconds(2))
    info, lines = llm.info, dict(llm.info.memory_plan)
    return Facts(
        name=name,
        dtype=info.dtype,
        kv_cache_dtype=info.kv_cache_dtype,
        weight_bytes=info.weight_bytes,
        cache_tokens=info.num_blocks * info.block_size,
        cache_bytes=lines["kv cache"],
        decode_tokens_per_second=speed,
        circumstances=circumstances(llm),
    )
