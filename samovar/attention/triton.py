"""Paged attention on NVIDIA GPUs through Triton: decoding sequences first, then everything else, two launches at most.

This module is imported on every machine; the kernels, which import Triton, only where they run.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch

from samovar.attention.base import AttentionCall, AttentionPlan, AttentionSpec, LayerCache, Spans, SpanTensors
from samovar.attention.latent_on_gpu import attend_latent, decode_splits
from samovar.core.cache_spec import CacheSpec
from samovar.core.device_facts import DeviceFacts
from samovar.hardware.latent_memory import made_at_once
from samovar.hardware.memory import SPLIT_PARTS
from samovar.kernels import overlap
from samovar.kernels.triton_launch import launch
from samovar.kernels.write_kv.layout import layer_cache
from samovar.kernels.write_kv.rows import bits_of

SPLITS = (1, 2, 4, 8, 16, 32)
"""In how many parts the keys of one decoding sequence may be read."""
MAX_PARTS = SPLIT_PARTS
"""Most parts (sequences x heads of keys x splits) of a step that is split: bounds the workspace, as planned."""
MIN_PART = 64
"""Keys that a part should have at least: below it starting and joining cost more than reading."""
LONG_KEYS = 2048
"""Keys from which on a sequence counts as long: larger tiles, and more parts than `SHORT_SPLITS`."""
SHORT_SPLITS = 16
"""Most parts of a step whose sequences are not much longer than `LONG_KEYS`: joining more takes longer than it saves."""
PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 128, "sm_90": 132, "sm_100": 148, "sm_120": 170, "sm_121": 48}
"""Multiprocessors of the largest usual GPU of an architecture."""
SCALAR = ("sm_60", "sm_61", "sm_70", "sm_72")
"""Architectures whose tensor cores, if any, Triton does not use."""
SMALL = ("sm_75", "sm_86", "sm_89", "sm_120", "sm_121")
"""Architectures whose shared memory does not hold the long tiles of large heads."""
MAX_LATENT = 640
"""Most numbers of a latent row: larger tiles do not fit into shared memory."""
FLOAT8 = 89
"""The first architecture whose instructions know floats of 8 bits."""
PROGRAMS_PER_PROCESSOR = 2
"""Decode programs that one multiprocessor needs at once to read as fast as it can."""
SCALAR_TILE, SHORT_TILE, LONG_TILE = 16, 64, 128
"""Rows of a tile without tensor cores; for few new tokens; for many."""
WIDE_HEAD, LARGEST_HEAD = 256, 512
"""Heads wider than the one, up to the other, have few keys in a tile, and few rows: sums of so many columns fill the
registers."""
WIDE_KEYS = 16
"""Keys in a tile of wide heads."""


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Keys of a tile, warps of a program, tiles under way at once, and rows of a tile (in decode a group's)."""

    keys: int
    warps: int
    stages: int
    rows: int = 0


CODED_DECODE = {
    "wide": TileConfig(64, 4, 3),
    "short": TileConfig(64, 2, 3),
    "split": TileConfig(128, 4, 3),
    "long": TileConfig(64, 4, 4),
    "packed": TileConfig(64, 4, 3),
}
"""Decode tiles of caches of codes: as many bytes as those of 16 bits have. Other tiles of packed values are brought into
the order of matrix instructions number by number."""


@dataclass(frozen=True, slots=True, eq=False)
class TritonPlan:
    """One step: sequences 0 .. num_decodes have one new token each, the longest `longest_total` tokens in all; the rest,
    `num_rows` rows, any number of new ones, up to `longest`.

    `is_exact`: one shape of tiles for every step, one path through the kernel; `is_scalar`: no tensor cores to use;
    `is_small`: little shared memory; `processors`: multiprocessors of the GPU.
    `splits` holds what was decided for each (heads of keys, most keys that a query sees).
    """

    spans: Spans
    tensors: SpanTensors
    num_decodes: int
    longest_total: int
    num_rows: int
    longest: int
    counters: torch.Tensor
    is_exact: bool
    is_scalar: bool
    is_small: bool
    processors: int
    splits: dict[tuple[int, int | None], int] = field(default_factory=dict)


class TritonAttention:
    """See the module. `is_deterministic`: a row's result depends on nothing but its own sequence.

    Not for two streams at once: programs of a split step meet at counters that belong to the backend.
    """

    name = "triton"
    captures = True

    def __init__(self) -> None:
        self.is_deterministic = False
        self._kinds: dict[tuple[int, int | None], None] = {}
        self._latent_heads: dict[int, None] = {}
        self._architecture = "sm_90"
        self._counters: dict[torch.device, torch.Tensor] = {}

    def accepts(self, spec: AttentionSpec, facts: DeviceFacts) -> str | None:
        """CUDA with Triton; every feature."""
        if facts.kind != "cuda":
            return "for CUDA GPUs"
        if importlib.util.find_spec("triton") is None:
            return "Triton is not installed"
        if spec.cache.latent is not None:
            return self._accepts_latent(spec, facts)
        if spec.cache.head_dim % 8 or spec.cache.head_dim > LARGEST_HEAD:
            return f"head dim {spec.cache.head_dim} is not a multiple of 8 up to {LARGEST_HEAD}"
        if (reason := codes_refusal(spec.cache, facts)) is not None:
            return reason
        self._kinds[spec.cache.num_kv_heads, spec.cache.window or spec.cache.chunk] = None
        self._architecture = facts.architecture
        return None

    def _accepts_latent(self, spec: AttentionSpec, facts: DeviceFacts) -> str | None:
        if self.is_deterministic:
            return "latent attention depends on the batch"
        if spec.cache.head_dim > MAX_LATENT:
            return f"latent rows of more than {MAX_LATENT} numbers"
        self._latent_heads[spec.num_heads] = None
        self._architecture = facts.architecture
        return None

    def launch_shape(self, spans: Spans) -> tuple[tuple[int, bool], ...]:
        """For each kind of layer accepted, the number of splits, and whether sequences are long."""
        totals, longest = spans.total_tokens, max(spans.total_tokens, default=0)
        is_small, is_scalar = self._architecture in SMALL, self._architecture in SCALAR
        latent = [
            decode_splits(totals, heads, self._processors, is_small=is_small, is_exact=is_scalar)
            for heads in self._latent_heads
        ]
        kinds = [(self.splits(totals, *kind), is_long(longest, kind[1])) for kind in self._kinds]
        return (*kinds, *((splits, False) for splits in latent))

    def splits(self, totals: Sequence[int], kv_heads: int, window: int | None) -> int:
        """How many parts each sequence is read in, so that no program reads much more than its share of all keys."""
        if self.is_deterministic or not totals:
            return 1
        longest, keys = max(totals), sum(totals)
        if window is not None:
            longest, keys = min(longest, window), min(keys, len(totals) * window)
        fair = max(MIN_PART, keys * kv_heads * 5 // (self._processors * PROGRAMS_PER_PROCESSOR * 4))
        most = SHORT_SPLITS if longest <= 2 * LONG_KEYS else SPLITS[-1]
        for splits in SPLITS:
            if splits == most or 2 * splits * len(totals) * kv_heads > MAX_PARTS or longest <= fair * splits:
                return splits
        return SPLITS[-1]

    @property
    def _processors(self) -> int:
        return PROCESSORS.get(self._architecture, PROCESSORS["sm_90"])

    def plan(self, spans: Spans) -> TritonPlan:
        """Counts on the host only; on the device everything is read from `spans.tensors`."""
        num_decodes = 0
        if not self.is_deterministic:
            while num_decodes < len(spans.new_tokens) and spans.new_tokens[num_decodes] == 1:
                num_decodes += 1
        rest = spans.new_tokens[num_decodes:]
        tensors = spans.tensors or span_tensors(spans)
        device = tensors.totals.device
        if device not in self._counters:
            # Kept for good: captured graphs know its address, and every step leaves it zeroed.
            self._counters[device] = torch.zeros(MAX_PARTS, dtype=torch.int32, device=device)
        return TritonPlan(
            spans=spans,
            tensors=tensors,
            num_decodes=num_decodes,
            longest_total=max(spans.total_tokens[:num_decodes], default=0),
            num_rows=sum(rest),
            longest=max(rest, default=0),
            counters=self._counters[device],
            is_exact=self.is_deterministic,
            is_scalar=self._architecture in SCALAR,
            is_small=self._architecture in SMALL,
            processors=self._processors,
        )

    def run(
        self,
        q: torch.Tensor,
        cache: LayerCache,
        plan: AttentionPlan,
        call: AttentionCall,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See `AttentionBackend.run`. Queries that nothing rotated are a slice of a wider product, and are copied."""
        if call.latent is not None:
            return attend_latent(q, cache, cast(TritonPlan, plan), call)
        q = q.contiguous()
        step, out = cast(TritonPlan, plan), torch.empty_like(q)
        if step.num_decodes:
            kind = (cache[0].shape[2], call.reach)
            if kind not in step.splits:
                step.splits[kind] = self.splits(step.spans.total_tokens[: step.num_decodes], *kind)
            decode(out, q, cache, step, call, sinks, step.splits[kind])
        if step.num_rows:
            self.prefill(out, q, cache, step, call, sinks)
        return out

    def prefill(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        cache: LayerCache,
        plan: TritonPlan,
        call: AttentionCall,
        sinks: torch.Tensor | None,
    ) -> None:
        """All sequences after the decoding ones."""
        part = (plan.num_decodes, len(plan.spans.new_tokens))
        prefill(out, q, cache, plan, call, sinks, part)

    def warm_examples(
        self, spec: AttentionSpec, dtypes: tuple[torch.dtype, torch.dtype], block_size: int, scale: float
    ) -> Iterator[tuple[torch.Tensor, LayerCache, Spans, AttentionCall, torch.Tensor | None]]:
        """(q, cache, spans, call, sinks) on "meta": `plan` and `run` of all of them name every kernel of a layer.

        `dtypes` are those of q and of the cache.
        """
        if spec.cache.latent is not None:
            yield from latent_examples(spec, dtypes, block_size, scale)
            return
        kv_heads, dim, group = spec.cache.num_kv_heads, spec.cache.head_dim, spec.num_heads // spec.cache.num_kv_heads
        call = AttentionCall(scale, spec.cache.window, spec.softcap, spec.cache.chunk)
        sinks = torch.empty(spec.num_heads, device="meta") if spec.has_sinks else None
        _, cache = layer_cache(spec.cache, (4, block_size), dtypes[1], "meta", is_head_major=True)
        many = PROGRAMS_PER_PROCESSOR * self._processors // kv_heads + 1
        # Decode: few and many sequences, long ones, a short and a long one in parts. Then a short and a long chunk.
        decodes = [(1, 1), (many, 1), (many, LONG_KEYS + 1), (1, 2 * MIN_PART), (1, LONG_KEYS + 1)]
        chunks = [(max(2, SHORT_TILE // group), SHORT_TILE), (2 * LONG_TILE, 2 * LONG_TILE)]
        for count, new, total in [(count, 1, total) for count, total in decodes] + [(1, *chunk) for chunk in chunks]:
            queries = meta_rows(count * new, spec.num_heads, dim, dtypes[0])
            yield queries, cache, meta_spans(new, total, count), call, sinks


def meta_rows(rows: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Queries without memory."""
    return torch.empty((rows, heads, dim), dtype=dtype, device="meta")


def meta_spans(new: int, total: int, count: int = 1) -> Spans:
    """`count` equal sequences, without memory."""
    tables = torch.empty((count, 64), dtype=torch.int32, device="meta")
    sizes = (count + 1, count, count)
    first_rows, totals, rows = (torch.empty(size, dtype=torch.int32, device="meta") for size in sizes)
    return Spans([new] * count, [total] * count, tables, SpanTensors(first_rows, totals, rows, tables))


def latent_examples(
    spec: AttentionSpec, dtypes: tuple[torch.dtype, torch.dtype], block_size: int, scale: float
) -> Iterator[tuple[torch.Tensor, LayerCache, Spans, AttentionCall, None]]:
    """`TritonAttention.warm_examples` of a latent layer: decode, whole and in parts; chunks absorbed, whole and in parts;
    keys made at once and in passes."""
    dims, heads = spec.cache.latent, spec.num_heads
    assert dims is not None
    rows = torch.empty((4, block_size, 1, dims.row), dtype=dtypes[1], device="meta")
    expansion = torch.empty((heads, dims.nope + dims.value, dims.rank), dtype=dtypes[0], device="meta")
    long = 3 * made_at_once(dims, heads, dtypes[0].itemsize)
    for count, new, total in (
        (1024, 1, 1),
        (1, 1, LONG_KEYS),
        (512, 2, LONG_KEYS),
        (1, 2, LONG_KEYS),
        (1, 9, 9),
        (1, long, long),
    ):
        queries = meta_rows(count * new, heads, dims.query, dtypes[0])
        yield queries, (rows, expansion), meta_spans(new, total, count), AttentionCall(scale, latent=dims), None


def span_tensors(spans: Spans) -> SpanTensors:
    """`Spans.tensors` made from the rest of `spans`, where the caller has none."""
    device, rows = spans.block_tables.device, [0]
    for new in spans.new_tokens:
        rows.append(rows[-1] + new)
    first_rows, totals = (torch.tensor(x, dtype=torch.int32, device=device) for x in (rows, list(spans.total_tokens)))
    table_rows = torch.arange(len(totals), dtype=torch.int32, device=device)
    return SpanTensors(first_rows, totals, table_rows, spans.block_tables.to(torch.int32).contiguous())


def codes_refusal(spec: CacheSpec, facts: DeviceFacts) -> str | None:
    """Why the kernels cannot read what `spec` stores; None if they can."""
    is_float8 = spec.bytes_per_element == 1 and not spec.has_row_scales
    if is_float8 and int(facts.architecture.removeprefix("sm_")) < FLOAT8:
        return f"8-bit floats need sm_{FLOAT8} or later; int8 does not"
    return None


def is_long(total: int, window: int | None) -> bool:
    """Whether decoding reads more than `LONG_KEYS` keys of a sequence of `total` tokens."""
    return total > LONG_KEYS and (window is None or window > LONG_KEYS)


def decode_tiles(dim: int, is_scalar: bool, splits: int, has_long: bool, value_bits: int = 16) -> TileConfig:
    """For a head dim and a launch shape; `is_scalar`: multiplied without tensor cores; `value_bits`: of a stored value.
    Measured on an H200 for 16 bits: small tiles start sooner, long sequences gain from more bytes under way."""
    if dim > WIDE_HEAD:
        return TileConfig(WIDE_KEYS, 4, 2)
    if is_scalar:
        return TileConfig(32, 4, 2)
    if dim > 128:
        return CODED_DECODE["wide"] if value_bits <= 8 else TileConfig(32, 4, 3)
    if value_bits < 8:
        return CODED_DECODE["packed"]
    if value_bits == 8:
        return CODED_DECODE["short" if not has_long else "split" if splits > 1 else "long"]
    if not has_long:
        return TileConfig(32, 2, 3)
    return TileConfig(64, 4, 3) if splits > 1 else TileConfig(32, 4, 4)


def decode_overlap(programs: int, splits: int, has_long: bool, processors: int) -> dict[str, Any]:
    """How a decode launch of `programs` programs overlaps with its neighbours.

    Few programs, as all that share sequences are, let the next kernel come at once: its programs fetch weights meanwhile.
    """
    options = overlap.launch_options()
    is_roomy = splits > 1 or (programs <= PROGRAMS_PER_PROCESSOR * processors and not has_long)
    return {**options, "IS_ROOMY": bool(options["OVERLAP"]) and is_roomy}


def prefill_tiles(dim: int, group: int, plan: TritonPlan, is_scalar: bool) -> TileConfig:
    """For a head dim, the query heads that share keys, and what the step is like."""
    if dim > WIDE_HEAD:
        rows = SCALAR_TILE if is_scalar or plan.is_small else SHORT_TILE
        return TileConfig(WIDE_KEYS, 8, 1 if is_scalar or plan.is_small else 2, max(rows, padded(group)))
    if is_scalar:
        return TileConfig(32, 4, 1, max(SCALAR_TILE, padded(group)))
    is_short = plan.is_exact or plan.longest * group <= SHORT_TILE or (plan.is_small and dim > 128)
    rows = max(SHORT_TILE if is_short else LONG_TILE, padded(group))
    if rows <= SHORT_TILE:
        return TileConfig(64 if dim <= 128 else 32, 4, 2, rows)
    return TileConfig(64, 8, 2 if plan.is_small else 3, rows) if dim <= 128 else TileConfig(32, 8, 2, rows)


def layout(q: torch.Tensor, cache: LayerCache, call: AttentionCall) -> dict[str, Any]:
    """The constants that every kernel takes. Raises `ValueError` for caches that are laid out otherwise."""
    import triton.language as tl

    keys, values = cache[:2]
    if keys.stride(3) != 1 or values.stride(3) != 1 or not q.is_contiguous():
        raise ValueError("rows of keys and values must be contiguous, and so must q")
    if is_wide(q, cache):
        compute = tl.float32
    else:
        compute = tl.bfloat16 if q.dtype == torch.bfloat16 and not is_coded(cache) else tl.float16
    dim = q.shape[2]
    return {
        "KV_HEADS": keys.shape[2],
        "GROUP": q.shape[1] // keys.shape[2],
        "HEAD_DIM": dim,
        "PAGE": keys.shape[1],
        **layout_of_rows(cache, dim),
        "WINDOW": call.window or -(call.chunk or 0),  # chunks are negative
        "SOFTCAP": float(call.softcap or 0),
        "DIM": padded(dim),
        "COMPUTE": compute,
    }


def layout_of_rows(cache: LayerCache, head_dim: int) -> dict[str, Any]:
    """Where rows and their scales lie, as constants. Scales of a block and head must lie side by side."""
    keys, values, *scales = cache
    has_row_scales = bool(scales) and scales[0].dim() == 3
    if has_row_scales and not all(scale.stride(1) == 1 for scale in scales):
        raise ValueError("scales of a block's rows must be contiguous, as they are in head-major caches")
    strides = [(scale.stride(0), scale.stride(2)) for scale in scales] if has_row_scales else [(0, 0), (0, 0)]
    return {
        **dict(zip(("KEY_BLOCK", "KEY_TOKEN", "KEY_HEAD"), keys.stride()[:3], strict=True)),
        **dict(zip(("VALUE_BLOCK", "VALUE_TOKEN", "VALUE_HEAD"), values.stride()[:3], strict=True)),
        **dict(zip(("KEY_SCALE_BLOCK", "KEY_SCALE_HEAD"), strides[0], strict=True)),
        **dict(zip(("VALUE_SCALE_BLOCK", "VALUE_SCALE_HEAD"), strides[1], strict=True)),
        "IS_CODED": is_coded(cache),
        "KEY_BITS": bits_of(keys, head_dim),
        "VALUE_BITS": bits_of(values, head_dim),
        "HAS_ROW_SCALES": has_row_scales,
    }


def scales_of(cache: LayerCache) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Those of keys and of values, if there are any."""
    return (cache[2], cache[3]) if len(cache) > 2 else (None, None)


def is_coded(cache: LayerCache) -> bool:
    """Whether the cache holds codes in place of numbers."""
    return cache[0].itemsize == 1


def is_wide(q: torch.Tensor, cache: LayerCache) -> bool:
    """Whether tiles are multiplied in float32: in 16 bits only if q and cache are of one dtype, or the cache of codes."""
    return q.itemsize == 4 or (q.dtype != cache[0].dtype and not is_coded(cache))


def padded(size: int) -> int:
    """The next power of two, at least 16: what tensor cores and ranges want."""
    return max(16, 1 << (size - 1).bit_length())


def decode(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: LayerCache,
    plan: TritonPlan,
    call: AttentionCall,
    sinks: torch.Tensor | None,
    splits: int,
    tiles: TileConfig | None = None,
) -> None:
    """The first `plan.num_decodes` rows of `q`, into those of `out`."""
    from samovar.attention.triton_decode import decode_attention

    options, on_device, seqs = layout(q, cache, call), plan.tensors, plan.num_decodes
    kv_heads, group, dim = options["KV_HEADS"], options["GROUP"], options["HEAD_DIM"]
    has_long = is_long(plan.longest_total, call.reach)
    tiles = tiles or decode_tiles(dim, plan.is_scalar or is_wide(q, cache), splits, has_long, options["VALUE_BITS"])
    programs = kv_heads * seqs * splits
    parts = programs * group if splits > 1 else 0
    partial = torch.empty((parts, dim), dtype=torch.float32, device=q.device)
    norms = torch.empty((parts, 2), dtype=torch.float32, device=q.device)
    tensors = (sinks, on_device.totals, on_device.table_rows, on_device.tables, partial, norms, plan.counters)
    launch(
        decode_attention,
        (kv_heads, seqs, splits),
        *(out, q, *cache[:2], *tensors, splits, on_device.tables.stride(0), call.scale, *scales_of(cache)),
        **options,
        **decode_overlap(programs, splits, has_long, plan.processors),
        MOST_SPLITS=1 if splits == 1 else SPLITS[-1] if has_long or splits > SHORT_SPLITS else SHORT_SPLITS,
        ROWS=padded(group),
        BLOCK_N=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def prefill(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: LayerCache,
    plan: TritonPlan,
    call: AttentionCall,
    sinks: torch.Tensor | None,
    part: tuple[int, int],
    tiles: TileConfig | None = None,
) -> None:
    """The rows of sequences part[0] .. part[1], whatever their number, into those of `out`; `tiles` are chosen unless
    given."""
    from samovar.attention.triton_prefill import prefill_attention

    options, on_device, (first, stop) = layout(q, cache, call), plan.tensors, part
    group = options["GROUP"]
    tiles = tiles or prefill_tiles(options["HEAD_DIM"], group, plan, plan.is_scalar or is_wide(q, cache))
    num_rows = sum(plan.spans.new_tokens[first:stop])
    tensors = (sinks, on_device.first_rows, on_device.totals, on_device.table_rows, on_device.tables)
    launch(
        prefill_attention,
        (options["KV_HEADS"], num_rows // (tiles.rows // group) + stop - first),
        *(out, q, *cache[:2], *tensors, on_device.tables.stride(0), first, stop, call.scale, *scales_of(cache)),
        **options,
        EXACT=plan.is_exact,
        BLOCK_M=tiles.rows,
        BLOCK_N=tiles.keys,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
