"""The memory plan: what a model needs, line by line, computed from shapes and settings before anything is loaded.

Plain arithmetic over plain numbers: no torch, no model code. The worker makes it from the model it bound without weights,
and allocates what it says; `samovar plan` prints that very plan.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from samovar.config.engine import EngineConfig, with_settings
from samovar.config.parse import parse_integer
from samovar.config.resolve import DEFAULT_BLOCK_SIZE, DEFAULT_NUM_SEQS
from samovar.core.cache_spec import KINDS, CacheSpec, StateSpec
from samovar.core.device_facts import DeviceFacts
from samovar.errors import ConfigError, MemoryPlanError
from samovar.hardware import latent_memory, state_memory

MIB, GIB = 1 << 20, 1 << 30

DEFAULT_STEP_TOKENS = 2048
"""Tokens of one step where `max_num_batched_tokens` is not set."""
TYPICAL_TOKENS = 1024
"""Tokens of an ordinary conversation: what the default CPU cache holds for each of `max_num_seqs` sequences."""
CPU_CACHE_SHARE = 0.25
"""Most of a CPU machine's available memory that the cache takes unless told otherwise."""
DEFAULT_SHARE = {"cpu": 0.8, "cuda": 0.9}
"""Part of the memory used where `--memory` is not given: of what is available on a CPU, of all on a GPU."""
CONTEXT_BYTES = 512 * MIB
"""What the driver keeps on a GPU for a process: its context, and the code of torch's, cuBLAS's and our kernels."""
RUNTIME_BYTES = {"cpu": 320 * MIB, "cuda": CONTEXT_BYTES + 288 * MIB}
"""Before a model: on a CPU the interpreter, torch and its libraries; on a GPU the context, and what the allocator
rounds up."""
CUBLAS_BYTES = 96 * MIB
"""cuBLAS's workspaces: 32 MiB on Hopper for each stream it is used on, and one for captured graphs."""
GRAPH_BYTES = 4 * MIB
"""One captured graph: what the driver keeps of some hundred launches and their arguments."""
GRAPHS_PER_BUCKET = 2
"""Attention launches that are captured for one batch size, as far as they are planned for."""
SPLIT_PARTS = 8192
"""Most parts (sequences x heads of keys x splits) of a decode step whose keys attention splits."""
LOGITS_BYTES = {"cpu": 64 * MIB, "cuda": 512 * MIB}
"""Most float32 logits that exist at once; more rows are computed in turns."""
SAMPLING_BYTES = {"cpu": 16 * MIB, "cuda": 128 * MIB}
"""Most logits the sampler works on at once."""
SAMPLING_COPIES = 6
"""Float32 copies of its logits that the sampler may hold."""
GATHERED_KEYS = 16384
"""Keys that attention gathers for several sequences at once."""
DECODED_BYTES = 16
"""What torch holds of each number while it makes it from a code."""
QUERY_TILE = 256
"""Queries of one sequence that attend together."""
HISTORY_STEP, SQUARE_STEP = 1024, 512
"""Where long chunks attend through a library: the steps in which the tokens before one, and the chunk with what is left
of them, are counted."""
THREAD_SCRATCH = 2 * MIB
"""Most that one thread of the CPU library works on at once: weights of a few rows as bfloat16, scores of a few queries."""
CACHE_LINES = ("kv cache", "recurrent state", "state snapshots")
"""Lines of a plan that are given back while an engine sleeps."""
LIBRARY_BYTES = 32 * MIB
"""What such a library may want for itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """The sizes of a bound model on one rank. `element_bytes` is that of activations; `cache_specs` has one per layer."""

    weight_bytes: int
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_dim: int
    max_position_embeddings: int
    element_bytes: int
    cache_specs: tuple[CacheSpec, ...]
    keeps_scores: bool = False
    """Attention scores are kept in memory, because a soft cap or sinks change them."""
    reads_pages: bool = False
    """Attention reads keys and values where the cache has them; otherwise it gathers them first."""
    gathers_chunks: bool = False
    """But for long chunks it gathers them nevertheless, for a library."""
    state_specs: tuple[StateSpec, ...] = ()
    """One for each recurrent layer."""
    columns: int | None = None
    """Float32 numbers that the CPU library's programs hold for each token, where they run whole steps."""

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that one token takes over all layers."""
        return sum(spec.bytes_per_token for spec in self.cache_specs)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What will be used. `lines` are (name, bytes); `explanation` says where the sizes of budget and cache come from."""

    lines: tuple[tuple[str, int], ...]
    num_blocks: int
    max_model_len: int
    budget_bytes: int
    explanation: str
    num_snapshots: int = 0
    """Snapshots of recurrent states that there is room for."""
    num_seqs: int = 0
    """Sequences that run in one step: those of the configuration, or fewer where their states would leave no room."""
    capacities: tuple[tuple[str, int], ...] = ()
    """Tokens that the cache's bytes would hold by kind of cache, as `--kv-cache-dtype` chooses it."""

    @property
    def total_bytes(self) -> int:
        """Sum of the lines."""
        return sum(size for _, size in self.lines)


def block_size(config: EngineConfig) -> int:
    """Tokens in one cache block, also of a configuration that leaves it open."""
    return config.cache.block_size or DEFAULT_BLOCK_SIZE


def num_seqs(config: EngineConfig) -> int:
    """Sequences that run in one step, also of a configuration that leaves it open."""
    return config.scheduler.max_num_seqs or DEFAULT_NUM_SEQS


def rows_at_once(vocab_size: int, most_bytes: int) -> int:
    """Rows of float32 logits that fit into `most_bytes`, at least one."""
    return max(1, most_bytes // (4 * vocab_size))


def logits_rows(vocab_size: int, config: EngineConfig, kind: str) -> int:
    """Rows of logits that a step makes at once."""
    return min(rows_at_once(vocab_size, LOGITS_BYTES[kind]), max(num_seqs(config), 64))


def step_tokens(config: EngineConfig, length: int) -> int:
    """Most tokens of a step, where sequences have up to `length`: without chunks a prompt is one step."""
    whole = 0 if config.scheduler.enable_chunked_prefill else length
    return max(config.scheduler.max_num_batched_tokens or DEFAULT_STEP_TOKENS, num_seqs(config), whole)


def plan_memory(shape: ModelShape, facts: DeviceFacts, config: EngineConfig) -> MemoryPlan:
    """Lines, cache blocks and context length of one rank, or `MemoryPlanError` with the smallest change that helps.

    `facts.available_bytes` is what is free before the model loads. `max_model_len` -1 becomes the longest that fits;
    None is the model's own.
    """
    wanted = config.model.max_model_len
    if wanted != -1:
        return _plan(shape, facts, config, wanted or shape.max_position_embeddings, is_fixed=True)
    length = shape.max_position_embeddings
    while length > 2 * block_size(config):
        try:
            return _plan(shape, facts, config, length, is_fixed=False)
        except MemoryPlanError:
            length //= 2  # Shorter sequences need less workspace, too.
    return _plan(shape, facts, config, length, is_fixed=False)


def _plan(shape: ModelShape, facts: DeviceFacts, config: EngineConfig, length: int, *, is_fixed: bool) -> MemoryPlan:
    """The plan for sequences of `length` tokens; if that is not fixed, for as many of those as the cache holds."""
    budget, why = _budget(facts, config)
    block_bytes = shape.cache_bytes_per_token * block_size(config)
    asked, num_snapshots = num_seqs(config), 0
    if shape.state_specs:
        config = _with_room_for_states(shape, facts, config, length, budget)
    fixed = _fixed_lines(shape, facts, config, length)
    if shape.state_specs:
        num_snapshots = _num_snapshots(shape, config, budget - sum(size for _, size in fixed))
        fixed = (*fixed, ("state snapshots", num_snapshots * state_memory.bytes_of(shape.state_specs)))
    room = budget - sum(size for _, size in fixed)
    if room < 2 * block_bytes and not _has_exact_cache(config):
        raise MemoryPlanError(_too_big(shape, fixed, budget, why, block_bytes))
    num_blocks, cache_why = _num_blocks(facts, config, length, room, block_bytes)
    fitting = (num_blocks - 1) * block_size(config)
    if fitting < (length if is_fixed else 1):
        needed = _blocks_for(length, config)
        reason = cache_why if _has_exact_cache(config) else f"{why}; {cache_why}"
        raise MemoryPlanError(
            f"one sequence of {length} tokens needs {needed} cache blocks ({_show(needed * block_bytes)}), but there are "
            f"{num_blocks} ({_show(num_blocks * block_bytes)}; {reason}): use --max-model-len {max(fitting, 1)}, or -1 "
            f"to take what fits"
        )
    lines = (*fixed, ("kv cache", num_blocks * block_bytes))
    if sum(size for _, size in lines) > budget:
        raise MemoryPlanError(
            f"{cache_why} needs {_show(sum(size for _, size in lines))} with the rest, but {_show(budget)} may be used "
            f"({why}): a cache of {_show(max(room, 0))} would fit"
        )
    capacities = tuple((kind, num_blocks * block_bytes // size) for kind, size in _token_sizes(shape) if size)
    seqs_why = "" if num_seqs(config) == asked else f"; no more than {num_seqs(config)} sequences have room for states"
    return MemoryPlan(
        lines,
        num_blocks,
        min(length, fitting),
        budget,
        f"{why}; {cache_why}{seqs_why}",
        num_snapshots,
        num_seqs(config),
        capacities,
    )


def _token_sizes(shape: ModelShape) -> list[tuple[str, int]]:
    """Bytes of a token by kind of cache; latent rows are not kept as codes."""
    if any(spec.latent is not None for spec in shape.cache_specs):
        return [("16 bits", sum(spec.stored_as("16 bits").bytes_per_token for spec in shape.cache_specs))]
    return [(kind, sum(spec.stored_as(kind).bytes_per_token for spec in shape.cache_specs)) for kind in KINDS]


def _with_room_for_states(
    shape: ModelShape, facts: DeviceFacts, config: EngineConfig, length: int, budget: int
) -> EngineConfig:
    """`config` with no more sequences than have room for their recurrent states."""
    others = _fixed_lines(replace(shape, state_specs=()), facts, config, length)
    room = budget - sum(size for _, size in others) - _exact_cache_bytes(shape, config)
    return with_settings(config, max_num_seqs=state_memory.most_seqs(shape.state_specs, room, num_seqs(config)))


def _num_snapshots(shape: ModelShape, config: EngineConfig, room: int) -> int:
    """How many snapshots of recurrent states there are; `room` is what they and the cache may take."""
    asked, specs = config.cache.state_snapshots, shape.state_specs
    if asked != "auto":
        return _size(asked, "--state-snapshots") // state_memory.bytes_of(specs)
    if not config.cache.enable_prefix_caching:
        return 0
    return state_memory.num_snapshots(specs, room - _exact_cache_bytes(shape, config), num_seqs(config))


def _exact_cache_bytes(shape: ModelShape, config: EngineConfig) -> int:
    """The size of the cache where it was asked for; 0 where it is what is left."""
    blocks = config.cache.num_gpu_blocks_override
    if blocks is not None:
        return blocks * shape.cache_bytes_per_token * block_size(config)
    return config.cache.kv_cache_memory_bytes or 0


def _has_exact_cache(config: EngineConfig) -> bool:
    return config.cache.num_gpu_blocks_override is not None or config.cache.kv_cache_memory_bytes is not None


def _blocks_for(length: int, config: EngineConfig) -> int:
    """Blocks that one sequence of `length` tokens needs, with one to spare for the token after it."""
    return -(-length // block_size(config)) + 1


def _fixed_lines(
    shape: ModelShape, facts: DeviceFacts, config: EngineConfig, length: int
) -> tuple[tuple[str, int], ...]:
    """Everything but the cache."""
    seqs = num_seqs(config)
    tokens = config.scheduler.max_num_batched_tokens or DEFAULT_STEP_TOKENS
    logits = logits_rows(shape.vocab_size, config, facts.kind)
    sampled = min(rows_at_once(shape.vocab_size, SAMPLING_BYTES[facts.kind]), seqs)
    tables = seqs * (_blocks_for(length, config) * 8 + 128)
    # On a CPU, histories of slots that no penalty reads are never touched.
    history = seqs * length * 4 if facts.kind == "cuda" else 0
    attention = split_bytes(shape) if shape.reads_pages else attention_bytes(shape, length, seqs)
    if shape.gathers_chunks:
        attention = max(attention, chunk_bytes(shape, length, min(tokens, length)))
    attention = max(attention, latent_bytes(shape, facts.kind, length=length, tokens=tokens, num_seqs=seqs))
    if shape.columns is None:
        working = (("activations", activation_bytes(shape, tokens)), ("attention workspace", attention))
    else:
        most, threads = step_tokens(config, length), config.device.threads or facts.num_threads
        working = (("activations", most * shape.columns * 4), ("kernel scratch", scratch_bytes(shape, most, threads)))
    return (
        ("weights", shape.weight_bytes),
        *working,
        ("logits", logits * shape.vocab_size * 4),
        ("sampling", sampled * shape.vocab_size * 4 * SAMPLING_COPIES),
        ("block tables and sampler state", tables + history),
        *state_memory.lines(shape.state_specs, seqs, tokens),
        *(_gpu_lines(shape, config) if facts.kind == "cuda" else ()),
        ("runtime", RUNTIME_BYTES[facts.kind]),
    )


def _gpu_lines(shape: ModelShape, config: EngineConfig) -> tuple[tuple[str, int], ...]:
    """What only a GPU needs."""
    if config.device.enforce_eager:
        return (("cuBLAS workspace", CUBLAS_BYTES),)
    buckets = decode_buckets(num_seqs(config))
    return (
        ("graph pool", activation_bytes(shape, buckets[-1]) + buckets[-1] * shape.vocab_size * 4),
        ("graphs", len(buckets) * GRAPHS_PER_BUCKET * GRAPH_BYTES),
        ("cuBLAS workspace", CUBLAS_BYTES),
    )


def decode_buckets(max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes for which decode steps are captured, up to `max_num_seqs`; others are padded to the next."""
    sizes = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, 512, 32), *range(512, max_num_seqs, 64)]
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


def activation_bytes(shape: ModelShape, tokens: int) -> int:
    """Most that `tokens` rows take between the layers: residual and norm, attention and MLP side by side."""
    wide = 6 * shape.hidden_size + 3 * shape.intermediate_size + 4 * shape.num_heads * shape.head_dim
    return tokens * wide * shape.element_bytes


def scratch_bytes(shape: ModelShape, tokens: int, num_threads: int) -> int:
    """Most that the CPU library holds while it runs a step: one linear's inputs as its kernels take them, and what each
    thread works on."""
    widest = max(shape.hidden_size, shape.intermediate_size, shape.num_heads * shape.head_dim)
    return tokens * widest * 4 + num_threads * THREAD_SCRATCH


def split_bytes(shape: ModelShape) -> int:
    """Most that decode attention in place holds: the float32 parts of each head's result, with maximum and sum."""
    specs = [spec for spec in shape.cache_specs if spec.latent is None]
    if shape.cache_specs and not specs:
        return 0
    kv_heads = min((spec.num_kv_heads for spec in specs), default=shape.num_heads)
    return SPLIT_PARTS * (-(-shape.num_heads // kv_heads) * (shape.head_dim + 2) + 1) * 4


def chunk_bytes(shape: ModelShape, length: int, tokens: int) -> int:
    """Most that attention of a chunk of `tokens` tokens through a library holds: queries and results for the chunk and
    for what is before it, their float32 sums, and the keys and values of one of the two."""
    kv_heads = min((spec.num_kv_heads for spec in shape.cache_specs), default=shape.num_heads)
    rows = tokens + HISTORY_STEP + SQUARE_STEP
    results = rows * shape.num_heads * (4 * shape.head_dim * shape.element_bytes + 2 * 4)
    # The chunk's own keys are repeated for each head of queries.
    keys = max(rows * shape.num_heads, length * kv_heads) * 2 * shape.head_dim * shape.element_bytes
    return results + keys + LIBRARY_BYTES


def attention_bytes(shape: ModelShape, length: int, num_seqs: int) -> int:
    """Most that one layer's attention holds: gathered keys and values, and one tile of queries' mask (or scores)."""
    # torch's kernel takes a 16-bit mask only as a float32 copy.
    mask_bytes = shape.element_bytes + (1 if shape.element_bytes == 4 else 4)
    most = 0
    for spec in {spec for spec in shape.cache_specs if spec.latent is None}:
        visible = length if spec.window is None else min(length, spec.window + QUERY_TILE)
        keys = max(visible, min(GATHERED_KEYS, num_seqs * visible))
        row = 2 * spec.num_kv_heads * spec.head_dim
        converted = shape.element_bytes if shape.element_bytes != spec.bytes_per_element else 0
        converted += DECODED_BYTES if spec.bytes_per_element == 1 else 0
        total = keys * row * (spec.bytes_per_element + converted) + QUERY_TILE * visible * mask_bytes
        if shape.keeps_scores:
            total += shape.num_heads * QUERY_TILE * visible * 8 + keys * row * 4
        most = max(most, total)
    return most


def latent_bytes(shape: ModelShape, kind: str, *, length: int, tokens: int, num_seqs: int) -> int:
    """The same of layers with latent rows."""
    most = 0
    for spec in {spec for spec in shape.cache_specs if spec.latent is not None}:
        assert spec.latent is not None
        sizes = (spec.latent, shape.num_heads, shape.element_bytes)
        if kind == "cuda":
            total = latent_memory.gpu_bytes(*sizes, length=length, tokens=tokens, num_seqs=num_seqs)
        else:
            keys = max(length, min(GATHERED_KEYS, num_seqs * length))
            cached = spec.bytes_per_element
            total = latent_memory.cpu_bytes(*sizes, keys=keys, tokens=tokens, num_seqs=num_seqs, cache_bytes=cached)
        most = max(most, total)
    return most


def _budget(facts: DeviceFacts, config: EngineConfig) -> tuple[int, str]:
    """(bytes this process may use, where the figure comes from)."""
    cache, available = config.cache, facts.available_bytes
    if cache.memory is not None:
        return _asked(cache.memory, facts)
    if cache.gpu_memory_utilization is not None:
        return _share(cache.gpu_memory_utilization, facts, "--gpu-memory-utilization")
    if facts.kind == "cuda" and not facts.is_unified:
        return _share(DEFAULT_SHARE["cuda"], facts, "default")
    share = DEFAULT_SHARE["cpu"]
    return int(share * available), f"{share:.0%} of the {_show(available)} available"


def _asked(text: str, facts: DeviceFacts) -> tuple[int, str]:
    """The budget that `--memory` names."""
    available = facts.available_bytes
    if text.startswith("leave="):
        left = _size(text.removeprefix("leave="), "--memory")
        return max(available - left, 0), f"--memory {text} of the {_show(available)} available"
    if re.fullmatch(r"0?\.\d+|1(\.0*)?", text):
        return _share(float(text), facts, "--memory")
    size = _size(text, "--memory")
    if size > available:
        raise MemoryPlanError(
            f"--memory {text}: only {_show(available)} are available; use --memory {available // MIB}MiB"
        )
    return size, f"--memory {text}"


def _size(text: str, flag: str) -> int:
    """Bytes of "8GiB", "500MB" or "1073741824"; raises `ConfigError`."""
    try:
        size = parse_integer(text)
    except ValueError:
        size = -1
    if size < 0:
        other = "a fraction such as 0.9" if flag == "--memory" else "auto"
        raise ConfigError(f"{flag}: {text!r} is neither {other} nor a size such as 8GiB or 500MB")
    return size


def _share(share: float, facts: DeviceFacts, name: str) -> tuple[int, str]:
    """A fraction of the whole memory, but no more than what is free."""
    wanted, free = int(share * facts.total_bytes), facts.available_bytes
    why = f"{name} {share:g} of {_show(facts.total_bytes)}"
    return (wanted, why) if wanted <= free else (free, f"{why}, lowered to the {_show(free)} available")


def _num_blocks(facts: DeviceFacts, config: EngineConfig, length: int, room: int, block_bytes: int) -> tuple[int, str]:
    """(cache blocks, where the figure comes from)."""
    cache = config.cache
    if not block_bytes:
        needed = _blocks_for(length, config)
        num_blocks = cache.num_gpu_blocks_override or max(
            needed, min(num_seqs(config) * needed, state_memory.STATELESS_BLOCKS)
        )
        return num_blocks, "no keys and values"
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override, f"--num-gpu-blocks-override {cache.num_gpu_blocks_override}"
    if cache.kv_cache_memory_bytes is not None:
        return cache.kv_cache_memory_bytes // block_bytes, f"--kv-cache-memory-bytes {cache.kv_cache_memory_bytes}"
    asked = cache.memory is not None or cache.gpu_memory_utilization is not None
    if facts.kind == "cuda" or asked:
        return room // block_bytes, "cache: all that is left"
    usual = num_seqs(config) * _blocks_for(min(length, TYPICAL_TOKENS), config)
    share = int(CPU_CACHE_SHARE * facts.available_bytes) // block_bytes
    num_blocks = min(max(min(usual, share), _blocks_for(length, config)), room // block_bytes)
    return (
        num_blocks,
        f"cache: {num_blocks * block_size(config)} tokens; pages that are never written cost nothing",
    )


def _too_big(shape: ModelShape, fixed: tuple[tuple[str, int], ...], budget: int, why: str, block_bytes: int) -> str:
    """The refusal when not even two cache blocks fit beside the rest."""
    need = sum(size for _, size in fixed) + 2 * block_bytes
    parts = ", ".join(f"{name} {_show(size)}" for name, size in fixed)
    half = shape.weight_bytes // 2
    # What settings cannot change: weights, runtime, two blocks.
    floor = shape.weight_bytes + dict(fixed)["runtime"] + 2 * block_bytes
    if floor <= budget:
        remedy = "lower --max-num-batched-tokens, --max-num-seqs or --max-model-len"
    elif shape.element_bytes == 4 and need - half <= budget:
        remedy = "use --dtype bfloat16, which halves the weights"
    else:
        remedy = "use a smaller or quantized model, or free memory"
    return f"the model needs at least {_show(need)} ({parts}), but {_show(budget)} may be used ({why}): {remedy}"


def _show(size: int) -> str:
    """Bytes for people."""
    if size >= GIB:
        return f"{size / GIB:.2f} GiB"
    return f"{size / MIB:.0f} MiB" if size >= 10 * MIB else f"{size / 1024:.0f} KiB"
