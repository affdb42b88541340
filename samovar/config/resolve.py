"""Turns every `auto` into a value with a reason: a list of small functions, applied in order.

The rules that several settings must keep together are in `config.rules`. Knows no torch and no file: what it needs of
the machine is in `DeviceFacts`, what it needs of the model in `ModelDescription`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig, with_settings
from samovar.config.rules import check_request, check_result
from samovar.core.device_facts import DeviceFacts
from samovar.errors import ConfigError

DTYPE_NAMES = {"float": "float32", "half": "float16"}
"""Second spellings of dtypes."""

GIB = 1 << 30

NO_STEP_TIME_TARGET = -1.0
"""What `step_time_target_ms` is set to for steps of any length."""
DEFAULT_BLOCK_SIZE = 16
"""Tokens in one cache block on a CPU."""
DEFAULT_NUM_SEQS = 256
"""Sequences that run in one step, but on a large GPU."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One setting that was not given, what it became, and a sentence why."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """The configuration with nothing left open, and how it came about."""

    config: EngineConfig
    decisions: list[Decision]

    def as_rows(self) -> list[tuple[str, str, str]]:
        """(name, value, reason) as text, for `EngineInfo.decisions`."""
        return [(d.name, str(d.value), d.reason) for d in self.decisions]


def resolve(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Resolved:
    """Decide what is open, in the order of `DECIDERS`. Raises `ConfigError` for what cannot be."""
    check_request(config)
    decisions: list[Decision] = []
    for decide in DECIDERS:
        decision = decide(config, description, facts)
        if decision is not None:
            decisions.append(decision)
            config = with_settings(config, **{decision.name: decision.value})
    check_result(config, description, facts)
    return Resolved(config, decisions)


def device(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """The device that was probed."""
    if config.device.device != "auto":
        return None
    return Decision("device", facts.kind, facts.name)


def load_format(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """What the checkpoint is."""
    if config.model.load_format != "auto":
        return None
    return Decision("load_format", description.format, f"the checkpoint is {description.path.name}")


def dtype(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """On a CPU what it computes fast; on a GPU the checkpoint's own 16-bit type, if the GPU has it."""
    asked = config.model.dtype
    if asked in DTYPE_NAMES:
        return Decision("dtype", DTYPE_NAMES[asked], f"{asked} means {DTYPE_NAMES[asked]}")
    if asked != "auto":
        return None
    if facts.kind == "cpu":
        if facts.has_kernels:
            return Decision("dtype", "bfloat16", "weights of 16 bits, or as the file has them; computed in float32")
        if facts.has_fast_bf16:
            return Decision("dtype", "bfloat16", f"{facts.architecture} multiplies bfloat16 in hardware")
        return Decision("dtype", "float32", f"{facts.architecture} has no fast bfloat16")
    stored = description.config.get("dtype") or description.config.get("torch_dtype") or "float32"
    if stored == "float16" and facts.has_fast_fp16:
        return Decision("dtype", "float16", "the checkpoint is float16")
    if facts.has_fast_bf16:
        return Decision("dtype", "bfloat16", f"the checkpoint is {stored}; {facts.architecture} has bfloat16")
    return Decision("dtype", "float16", f"{facts.architecture} has no bfloat16")


def kv_cache_dtype(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """Follows the model."""
    if config.cache.kv_cache_dtype == "fp8":
        return Decision("kv_cache_dtype", "fp8_e4m3", "fp8 means fp8_e4m3")
    if config.cache.kv_cache_dtype != "auto":
        return None
    return Decision("kv_cache_dtype", config.model.dtype, "follows --dtype")


def block_size(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """What the attention of the device reads best, and short enough that few tokens of a sequence's last block idle."""
    if config.cache.block_size > 0:
        return None
    if facts.kind == "cuda":
        return Decision("block_size", 32, "one tile of keys for the attention kernels")
    return Decision("block_size", DEFAULT_BLOCK_SIZE, "fine grains for the prefix cache")


def max_num_seqs(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """More sequences share each reading of the weights; a large GPU has the memory for their keys and values."""
    if config.scheduler.max_num_seqs > 0:
        return None
    if facts.kind == "cuda" and facts.total_bytes >= 70 * GIB:
        return Decision("max_num_seqs", 512, f"{facts.total_bytes / GIB:.0f} GiB of device memory")
    return Decision("max_num_seqs", DEFAULT_NUM_SEQS, "usual")


def threads(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """Physical cores on a CPU; a GPU's host needs few."""
    if config.device.threads is not None:
        return None
    if facts.kind == "cuda":
        return Decision("threads", min(4, facts.num_threads), "the GPU computes; the CPU only launches")
    return Decision("threads", facts.num_threads, "physical cores this process may use")


def max_model_len(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """The model's own context. -1 stays: the memory plan turns it into what fits."""
    if config.model.max_model_len is not None:
        return None
    own = description.max_position_embeddings
    if own < 1:
        raise ConfigError(f"{description.path}: the checkpoint does not say its context length; give --max-model-len")
    return Decision("max_model_len", own, "the model's own context (max_position_embeddings)")


def max_num_batched_tokens(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """Enough to fill the device, small enough that a step stays short and its activations small."""
    if config.scheduler.max_num_batched_tokens is not None:
        return None
    if not config.scheduler.enable_chunked_prefill:
        longest = max(config.model.max_model_len or 0, 2048)
        return Decision("max_num_batched_tokens", longest, "without chunked prefill a whole prompt is one step")
    if facts.kind == "cpu":
        num_threads = config.device.threads or facts.num_threads
        tokens = max(min(2048, max(512, 128 * num_threads)), config.scheduler.max_num_seqs)
        words = "1 thread" if num_threads == 1 else f"{num_threads} threads"
        return Decision("max_num_batched_tokens", tokens, f"a CPU with {words}")
    tokens = 16384 if facts.total_bytes >= 160 * GIB else 8192 if facts.total_bytes >= 70 * GIB else 2048
    tokens = max(tokens, config.scheduler.max_num_seqs)
    return Decision("max_num_batched_tokens", tokens, f"{facts.total_bytes / GIB:.0f} GiB of device memory")


def step_time_target_ms(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """How long decoding sequences may wait for somebody's prefill chunk."""
    if config.scheduler.step_time_target_ms != 0:
        return None
    if facts.kind == "cpu":
        return Decision("step_time_target_ms", 250.0, "four tokens a second for readers while prompts are computed")
    return Decision("step_time_target_ms", 45.0, "twenty tokens a second for readers while prompts are computed")


def generation_config(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """Which sampling defaults were added for an alias. It stays as it is: `describe` has followed it already."""
    if not description.recommended or config.model.generation_config != "auto":
        return None
    values = ", ".join(f"{name} {value:g}" for name, value in description.recommended.items())
    return Decision(
        "generation_config", "auto", f"{values} where a request says nothing, as the model's card recommends"
    )


def structured_outputs_backend(
    config: EngineConfig, description: ModelDescription, facts: DeviceFacts
) -> Decision | None:
    """The one that follows grammars of every kind."""
    if config.device.structured_outputs_backend != "auto":
        return None
    return Decision("structured_outputs_backend", "llguidance", "follows every kind of grammar")


def max_logprobs(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> Decision | None:
    """-1 means the whole vocabulary."""
    if config.model.max_logprobs != -1:
        return None
    return Decision("max_logprobs", description.vocab_size, "-1: the whole vocabulary")


Decider = Callable[[EngineConfig, ModelDescription, DeviceFacts], Decision | None]

DECIDERS: tuple[Decider, ...] = (
    device,
    load_format,
    dtype,
    kv_cache_dtype,
    block_size,
    max_num_seqs,
    threads,
    max_model_len,
    max_num_batched_tokens,
    step_time_target_ms,
    max_logprobs,
    structured_outputs_backend,
    generation_config,
)
"""Each sees what those before it decided."""
