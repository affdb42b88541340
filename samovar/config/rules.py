"""Rules over several settings, one function each; every message names both settings and the way out."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

from samovar.config.description import ModelDescription
from samovar.config.engine import EngineConfig
from samovar.config.groups import ServerConfig
from samovar.config.weight_formats import AT_LOAD, names, stored_name
from samovar.core.device_facts import DeviceFacts
from samovar.errors import ConfigError


def no_remote_code(config: EngineConfig) -> str | None:
    """Code of a model repository is never run."""
    if config.model.trust_remote_code:
        return "--trust-remote-code: no code is ever run from a model repository; leave the flag out"
    return None


def one_device(config: EngineConfig) -> str | None:
    """Tensor parallelism does not exist yet."""
    if (size := config.device.tensor_parallel_size) > 1:
        return f"--tensor-parallel-size {size} is not available yet: one device per engine; run several servers behind a balancer"
    return None


def no_determinism_on_cpu(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> str | None:
    """Batch-invariant kernels exist for GPUs only."""
    if config.device.deterministic and facts.kind == "cpu":
        return "--deterministic needs a GPU: no kernel for CPUs is batch-invariant; requests with a seed repeat at equal batch sizes"
    return None


def one_memory_budget(config: EngineConfig) -> str | None:
    """Two spellings of one budget may not both be given."""
    cache = config.cache
    if cache.memory is not None and cache.gpu_memory_utilization is not None:
        return f"--memory {cache.memory} and --gpu-memory-utilization {cache.gpu_memory_utilization} set the same thing; give one"
    return None


def xgrammar_is_there(config: EngineConfig) -> str | None:
    """The second grammar backend is an extra."""
    if config.device.structured_outputs_backend == "xgrammar" and find_spec("xgrammar") is None:
        return (
            "--structured-outputs-backend xgrammar needs a package that is not installed; in Samovar's folder: "
            "pip install -c constraints.txt -e '.[xgrammar]'"
        )
    return None


def one_kv_size(config: EngineConfig) -> str | None:
    """A number of blocks and a number of bytes both size the cache."""
    cache = config.cache
    if cache.kv_cache_memory_bytes is not None and cache.num_gpu_blocks_override is not None:
        return (
            f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes} and --num-gpu-blocks-override "
            f"{cache.num_gpu_blocks_override} set the same thing; give one"
        )
    return None


def whole_prompts_fit(config: EngineConfig) -> str | None:
    """Without chunked prefill the longest prompt is one step."""
    tokens, longest = config.scheduler.max_num_batched_tokens, config.model.max_model_len
    if config.scheduler.enable_chunked_prefill or tokens is None or longest is None or tokens >= longest:
        return None
    return (
        f"--no-enable-chunked-prefill needs --max-num-batched-tokens {tokens} to hold --max-model-len {longest}; "
        "raise the first, lower the second, or allow chunks"
    )


def chunk_fits_batch(config: EngineConfig) -> str | None:
    """A chunk limit above the step's budget would never bind."""
    chunk, tokens = config.scheduler.long_prefill_token_threshold, config.scheduler.max_num_batched_tokens
    if tokens is not None and chunk > tokens:
        return f"--long-prefill-token-threshold {chunk} is more than --max-num-batched-tokens {tokens} and would never bind; lower it"
    return None


def device_is_there(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> str | None:
    """The device asked for is the one that was probed."""
    if config.device.device != facts.kind:
        return f"--device {config.device.device}: this machine's device is {facts.kind} ({facts.name})"
    return None


def format_is_there(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> str | None:
    """The format asked for is the one that was found."""
    if config.model.load_format != description.format:
        return f"--load-format {config.model.load_format}: {description.path} is {description.format}; use --load-format auto"
    return None


def quantization_is_there(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> str | None:
    """The format asked for is the checkpoint's own, or one that plain linears can be brought into."""
    asked, stored = config.model.quantization, stored_name(description)
    if asked is None or names(asked, stored) or (asked == "gguf" and description.format == "dummy"):
        return None
    if asked in AT_LOAD and stored != "gguf":
        return None
    what = "plain" if stored is None else f"quantized as {stored}" if stored != "gguf" else "a GGUF file"
    choice = (
        "" if stored == "gguf" else f" or choose one of {', '.join(AT_LOAD)}, which plain linears become while loading"
    )
    return f"--quantization {asked}: {description.path} is {what}; leave the flag out{choice}"


def context_within_model(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> str | None:
    """Positions the model never saw need the rope settings changed knowingly."""
    longest, own = config.model.max_model_len or 0, description.max_position_embeddings
    if own and longest > own:
        return (
            f"--max-model-len {longest} is beyond the model's own {own} positions; lower it, or extend the model with "
            f"--hf-overrides '{{\"max_position_embeddings\": {longest}, ...}}' and fitting rope settings"
        )
    return None


REQUEST_RULES: tuple[Callable[[EngineConfig], str | None], ...] = (
    no_remote_code,
    one_device,
    one_memory_budget,
    one_kv_size,
    xgrammar_is_there,
    whole_prompts_fit,
    chunk_fits_batch,
)
"""What can be said before the model and the machine are known."""

RESULT_RULES: tuple[Callable[[EngineConfig, ModelDescription, DeviceFacts], str | None], ...] = (
    device_is_there,
    format_is_there,
    quantization_is_there,
    context_within_model,
    no_determinism_on_cpu,
)
"""What can be said when nothing is open any more."""


def check_request(config: EngineConfig) -> None:
    """Raise `ConfigError` with the first broken rule; needs neither model nor machine."""
    for rule in REQUEST_RULES:
        if complaint := rule(config):
            raise ConfigError(complaint)


def check_result(config: EngineConfig, description: ModelDescription, facts: DeviceFacts) -> None:
    """Raise `ConfigError` with the first rule the resolved configuration breaks."""
    for rule in RESULT_RULES:
        if complaint := rule(config, description, facts):
            raise ConfigError(complaint)
    check_request(config)


def no_empty_key(server: ServerConfig) -> str | None:
    """An empty key would let everybody in."""
    if any(not key.strip() for key in server.api_key):
        return "--api-key must not be empty; leave the flag out to run without a key"
    return None


def no_empty_admin_key(server: ServerConfig) -> str | None:
    """An empty key would let everybody in."""
    if any(not key.strip() for key in server.admin_api_key):
        return "--admin-api-key must not be empty; leave the flag out to have no admin key"
    return None


def one_address(server: ServerConfig) -> str | None:
    """A Unix socket has no port."""
    if server.uds is not None and (server.port != ServerConfig.port or server.host != ServerConfig.host):
        return f"--uds {server.uds} listens on a Unix socket; leave out --host and --port"
    return None


def no_empty_name(server: ServerConfig) -> str | None:
    """A model without a name cannot be asked for."""
    if any(not name.strip() for name in server.served_model_name):
        return "--served-model-name must not be empty; leave the flag out to use the model's own name"
    return None


SERVER_RULES: tuple[Callable[[ServerConfig], str | None], ...] = (
    no_empty_key,
    no_empty_admin_key,
    no_empty_name,
    one_address,
)
"""Rules of the HTTP front end."""


def check_server(server: ServerConfig) -> None:
    """Raise `ConfigError` with the first broken rule."""
    for rule in SERVER_RULES:
        if complaint := rule(server):
            raise ConfigError(complaint)
