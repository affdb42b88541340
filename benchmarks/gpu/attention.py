"""Paged attention on a GPU: correct at real sizes, then decode against the memory bus and prefill against other kernels.

PYTHONPATH=. python3 benchmarks/gpu/attention.py [check] [decode] [long] [prefill], all by default. Decode times are
medians of graph replays whose launches read different sequences, more than the L2 cache holds; percentages are of the
bytes of keys and values at 4.3 TB/s. A star marks what the backend chooses. Prefill is in TFLOP/s of causal attention.
"""

from __future__ import annotations

import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from samovar.attention import triton as backend_module
from samovar.attention.base import AttentionCall, LayerCache, Spans, SpanTensors
from samovar.attention.cudnn import CudnnAttention, attend_dense
from samovar.attention.reference import ReferenceAttention
from samovar.attention.triton import (
    SPLITS,
    TileConfig,
    TritonAttention,
    TritonPlan,
    decode,
    decode_tiles,
    is_long,
    prefill,
    prefill_tiles,
)
from samovar.cache.kv_cache import KVCache
from samovar.core.cache_spec import CacheSpec
from samovar.kernels import overlap
from samovar.kernels.linear_add.triton import linear_add_triton
from samovar.kernels.norm_linear.triton import norm_linear_triton
from samovar.kernels.rope_write_kv.triton import rope_write_kv_triton
from samovar.kernels.triton_launch import compile_all, noting

BYTES_PER_SECOND, L2_BYTES, DEVICE, DTYPE, DIM = 4.3e12, 120 << 20, "cuda", torch.bfloat16, 128
DECODE_TILES = [
    *(TileConfig(keys, 4, stages) for keys in (32, 64) for stages in (2, 3, 4)),
    *(TileConfig(keys, 2, stages) for keys in (32, 64) for stages in (3, 4)),
    *(TileConfig(keys, warps, 2) for keys, warps in ((128, 4), (128, 8))),
    *(TileConfig(keys, 8, 3) for keys in (64, 128)),
]
PREFILL_TILES = [
    *(TileConfig(keys, 4, stages, 64) for keys, stages in ((32, 3), (64, 2), (64, 3), (128, 2))),
    *(TileConfig(keys, 8, stages, 128) for keys, stages in ((64, 2), (64, 3), (128, 2), (128, 3))),
    TileConfig(64, 4, 2, 128),
]


@dataclass(frozen=True)
class Steps:
    """Several steps of equal lengths over different blocks of one cache."""

    q: torch.Tensor
    cache: LayerCache
    spans: list[Spans]
    key_bytes: int


def make_steps(
    sizes: Sequence[tuple[int, int]],
    heads: tuple[int, int],
    *,
    page: int = 16,
    dtype: torch.dtype = DTYPE,
    most: int = 64,
    coded: tuple[CacheSpec, torch.dtype] | None = None,
) -> Steps:
    """Random q, keys and values; as many steps as fill the L2 cache twice, at most `most`; blocks in random order.
    `coded`: a cache of codes in place of numbers of `dtype`."""
    blocks = [-(-total // page) for _, total in sizes]
    spec, stored = coded or (CacheSpec("full", heads[1], DIM, dtype.itemsize), dtype)
    step_bytes = sum(blocks) * page * spec.bytes_per_token
    count = max(1, min(most, -(-L2_BYTES // step_bytes)))
    cache = KVCache([spec], sum(blocks) * count, page, stored, DEVICE).layers[0]
    for rows in cache[:2]:
        if rows.itemsize == 1:
            rows.view(torch.uint8).random_(0, 96)
        else:
            rows.transpose(1, 2).normal_()
    for scales in cache[2:]:
        scales.fill_(0.01)
    order = torch.randperm(sum(blocks) * count, dtype=torch.int32)
    spans, used = [], 0
    firsts = list(itertools.accumulate((new for new, _ in sizes), initial=0))
    for _ in range(count):
        tables = torch.zeros((len(sizes), max(blocks)), dtype=torch.int32)
        for row, length in enumerate(blocks):
            tables[row, :length] = order[used : used + length]
            used += length
        ints = (firsts, [total for _, total in sizes], list(range(len(sizes))))
        tables = tables.to(DEVICE)
        first, totals, rows = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ints)
        tensors = SpanTensors(first, totals, rows, tables)
        spans.append(Spans([new for new, _ in sizes], ints[1], tables, tensors))
    q = torch.randn((firsts[-1], heads[0], DIM), device=DEVICE).to(dtype)
    return Steps(q, cache, spans, sum(total for _, total in sizes) * spec.bytes_per_token)


def graph_microseconds(work: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Median time of one of `work` when all are replayed in a graph."""
    for one in work[:1]:
        one()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for one in work:
            one()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / len(work))
    return statistics.median(times)


def event_microseconds(work: Callable[[], object], repeats: int = 3) -> float:
    """Median time of one call."""
    work()
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000)
    return statistics.median(times)


def compile_first(work: Sequence[Callable[[], object]]) -> None:
    """Compile what `work` launches, on all cores; what does not compile will say so when it runs."""
    with noting() as notes:
        for one in work:
            one()
    began = time.perf_counter()
    count = compile_all(notes, os.cpu_count() or 4)
    print(f"[{count} kernels compiled in {time.perf_counter() - began:.1f} s]", flush=True)


def check() -> None:
    """Against the reference at real sizes, and that split decode repeats itself bit for bit."""
    print("\ncheck: largest error against the reference, relative to the largest value")
    cases: dict[str, tuple[list[tuple[int, int]], tuple[int, int]]] = {
        "decode 32/8": ([(1, n) for n in (576, 1, 64, 4000, 577, 0, 130, 9000)], (32, 8)),
        "decode 16/8 x 256": ([(1, 500 + i) for i in range(256)], (16, 8)),
        "mixed 32/8": ([(1, 700), (1, 33), (512, 512), (5, 900), (1000, 3000), (2048, 2048), (1, 4)], (32, 8)),
        "chunk 32/8": ([(3000, 5500)], (32, 8)),
    }
    calls = {"": AttentionCall(0.09), "window": AttentionCall(0.09, 300), "cap": AttentionCall(0.09, None, 20.0)}
    runs: list[tuple[str, str, Steps, AttentionCall, torch.Tensor | None, Callable[[], torch.Tensor]]] = []
    for (name, (sizes, heads)), dtype in itertools.product(
        cases.items(), (torch.bfloat16, torch.float16, torch.float32)
    ):
        if dtype != DTYPE and len(sizes) > 100:
            continue
        steps = make_steps(sizes, heads, dtype=dtype, most=1)
        for kind, call in calls.items() if dtype == DTYPE else (("", calls[""]),):
            sinks = torch.randn(heads[0], device=DEVICE) if kind == "cap" else None
            for backend in (TritonAttention(), CudnnAttention()):
                is_fit = not kind and dtype != torch.float32 and max(new for new, _ in sizes) > 1
                if backend.name == "triton" or is_fit:
                    plan = backend.plan(steps.spans[0])
                    work = partial(backend.run, steps.q, steps.cache, plan, call, sinks)
                    runs.append((name, f"{backend.name} {str(dtype)[6:]} {kind}", steps, call, sinks, work))
    compile_first([run[-1] for run in runs if "cudnn" not in run[1]])
    for name, group in itertools.groupby(runs, lambda run: run[0]):
        cells = []
        for _, label, steps, call, sinks, work in group:
            expected = reference(steps, call, sinks)
            try:
                error = float((work().float() - expected).abs().max() / expected.abs().max())
                cells.append(f"{label} {error:.1e}")
            except RuntimeError as failure:
                cells.append(f"{label} failed: {str(failure)[:200]}")
        print(f"  {name}: " + " · ".join(cells), flush=True)
    steps = make_steps([(1, 3000)] * 16, (32, 8), most=1)
    plan, call = TritonAttention().plan(steps.spans[0]), AttentionCall(0.09)
    outs = [torch.empty_like(steps.q) for _ in range(200)]
    for out in outs:
        decode(out, steps.q, steps.cache, plan, call, None, 16)
    same = all(torch.equal(out, outs[0]) for out in outs)
    print(f"  200 runs of split decode {'agree' if same else 'DIFFER'}; counters {int(plan.counters.abs().sum())}")


def reference(steps: Steps, call: AttentionCall, sinks: torch.Tensor | None) -> torch.Tensor:
    """In float32, sequence by sequence; zeros for sequences without keys."""
    spans, out = steps.spans[0], torch.zeros(steps.q.shape, device=DEVICE)
    firsts = list(itertools.accumulate(spans.new_tokens, initial=0))
    for i, total in enumerate(spans.total_tokens):
        if not total:
            continue
        one = Spans([spans.new_tokens[i]], [spans.total_tokens[i]], spans.block_tables[i : i + 1])
        rows = slice(firsts[i], firsts[i + 1])
        out[rows] = ReferenceAttention().run(steps.q[rows].float(), steps.cache, one, call, sinks)
    return out


def decode_work(steps: Steps, splits: int, tiles: TileConfig) -> list[Callable[[], object]]:
    """One launch for each of `steps`."""
    backend, call = TritonAttention(), AttentionCall(0.09)
    out = torch.empty_like(steps.q)
    plans = [backend.plan(spans) for spans in steps.spans]
    return [partial(decode, out, steps.q, steps.cache, plan, call, None, splits, tiles) for plan in plans]


def compile_decode(groups: Sequence[tuple[int, int]], pages: Sequence[int], tiles: Sequence[TileConfig]) -> None:
    """Every kernel that the decode tables run."""
    work: list[Callable[[], object]] = []
    for heads, page in itertools.product(groups, pages):
        steps = make_steps([(1, 64)], heads, page=page, most=1)
        work += [decode_work(steps, splits, one)[0] for splits in (1, 2) for one in tiles]
    compile_first(work)


def chosen_tiles(longest: int, splits: int) -> TileConfig:
    """What the backend takes."""
    return decode_tiles(DIM, False, splits, is_long(longest, None))


def decode_grid() -> None:
    """Batch sizes by splits by tiles: the best five, and the backend's own choice; then page sizes."""
    print("\ndecode, 576 keys per sequence: microseconds (share of 4.3 TB/s) keys/warps/stages/splits")
    groups = ((32, 8), (16, 8))
    compile_decode(groups, (16,), DECODE_TILES)
    for heads, batch in itertools.product(groups, (1, 8, 32, 64, 256)):
        steps = make_steps([(1, 576)] * batch, heads)
        chosen = TritonAttention().splits(steps.spans[0].total_tokens, heads[1], None)
        found = []
        for tiles, splits in itertools.product(DECODE_TILES, SPLITS):
            if (splits > 1 and batch * splits > 256) or splits > 16:
                continue
            micros = measured(decode_work(steps, splits, tiles))
            is_chosen = tiles == chosen_tiles(576, splits) and splits == chosen
            found.append((micros, tiles, splits, is_chosen))
        show(f"{heads[0]}/{heads[1]} batch {batch}", found, steps.key_bytes)
    compile_decode(((32, 8),), (32, 64), [chosen_tiles(576, 1)])
    for batch in (32, 256):
        cells = []
        for page in (16, 32, 64):
            steps = make_steps([(1, 576)] * batch, (32, 8), page=page)
            micros = measured(decode_work(steps, 1, chosen_tiles(576, 1)))
            cells.append(f"{page}: {micros:.1f} ({steps.key_bytes / BYTES_PER_SECOND / micros * 1e8:.0f} %)")
        print(f"  32/8 batch {batch}, one part, by page size  " + " · ".join(cells), flush=True)


def decode_long() -> None:
    """Long and uneven sequences."""
    print("\nlong decode, 32/8 heads: the same")
    tiles = [
        TileConfig(64, 4, 3),
        TileConfig(32, 4, 4),
        TileConfig(32, 2, 3),
        TileConfig(32, 2, 4),
        TileConfig(128, 8, 3),
    ]
    compile_decode(((32, 8),), (16,), tiles)
    for name, totals in {
        "1 x 4K": [4096],
        "1 x 32K": [32768],
        "8 x 8K": [8192] * 8,
        "64 x 4K": [4096] * 64,
        "1 x 32K + 31 x 500": [32768] + [500] * 31,
    }.items():
        steps = make_steps([(1, total) for total in totals], (32, 8), most=16)
        chosen = TritonAttention().splits(totals, 8, None)
        found = []
        for one, splits in itertools.product(tiles, SPLITS):
            micros = measured(decode_work(steps, splits, one))
            found.append((micros, one, splits, one == chosen_tiles(max(totals), splits) and splits == chosen))
        show(name, found, steps.key_bytes)


OVERLAPS: dict[str, dict[str, object] | None] = {
    "none": None,
    "chosen": {},
    "next one late": {"IS_ROOMY": False},
    "next one early": {"IS_ROOMY": True},
}
"""How decode overlaps with its neighbours: not at all, or as chosen but for some constants."""


def neighbours() -> None:
    """A chain as layers have it: joint projection, rope and K/V write, decode, output projection."""
    print("\nprojection, rope + K/V write, decode and output projection, 576 keys: microseconds by kind of overlap")
    chosen = backend_module.decode_overlap
    for heads, hidden in (((16, 8), 1024), ((32, 8), 4096)):
        for batch in (1, 8, 32, 64):
            steps, cells = make_steps([(1, 576)] * batch, heads, page=32, most=16), []
            for name, constants in OVERLAPS.items():
                overlap.switch(constants is not None)
                with_constants = partial(changed, chosen, constants or {})
                backend_module.decode_overlap = with_constants  # type: ignore[assignment]
                work = chain(steps, heads, hidden)
                compile_first(work[:1])
                cells.append(f"{name} {measured(work):.1f}")
            print(f"  {heads[0]}/{heads[1]} hidden {hidden} batch {batch}: " + " · ".join(cells), flush=True)
    backend_module.decode_overlap = chosen
    overlap.switch(False)


def changed(chosen: Callable[..., dict[str, object]], constants: dict[str, object], *arguments: object) -> object:
    """What `chosen` says, with other constants."""
    return chosen(*arguments) | constants


def chain(steps: Steps, heads: tuple[int, int], hidden: int) -> list[Callable[[], object]]:
    """One chain for each of `steps`, every one with weights of its own."""
    tokens, rows, backend, work = len(steps.q), heads[0] + 2 * heads[1], TritonAttention(), []
    x = torch.randn((tokens, hidden), device=DEVICE).to(DTYPE)
    gain, turn = (
        torch.ones(hidden, device=DEVICE, dtype=DTYPE),
        torch.ones((2, tokens, 1, DIM), device=DEVICE).to(DTYPE),
    )
    for spans in steps.spans:
        w_qkv, w_o = (
            torch.randn(shape, device=DEVICE).to(DTYPE) / 64
            for shape in ((rows * DIM, hidden), (hidden, heads[0] * DIM))
        )
        page, at = steps.cache[0].shape[1], spans.total_tokens[0] - 1
        slots = spans.block_tables[:, at // page].long() * page + at % page

        def one(
            spans: Spans = spans, w_qkv: torch.Tensor = w_qkv, w_o: torch.Tensor = w_o, slots: torch.Tensor = slots
        ) -> None:
            qkv = norm_linear_triton(x, gain, 1e-6, w_qkv).view(tokens, rows, DIM)
            q = rope_write_kv_triton(qkv, turn[0], turn[1], *steps.cache, slots, None, None, 1e-6, heads[0])
            out = backend.run(q, steps.cache, backend.plan(spans), AttentionCall(0.09))
            linear_add_triton(out.flatten(1), w_o, x)

        work.append(one)
    return work


def measured(work: Sequence[Callable[[], object]]) -> float:
    """Microseconds of one, or infinity if the GPU cannot hold the kernel."""
    try:
        return graph_microseconds(work)
    except (RuntimeError, ValueError) as failure:
        print(f"    {type(failure).__name__}: {str(failure)[:160]}")
        return float("inf")
    except Exception as failure:  # Triton's own, when a kernel needs more than there is
        print(f"    {type(failure).__name__}: {str(failure)[:160]}")
        return float("inf")


def show(name: str, found: list[tuple[float, TileConfig, int, bool]], key_bytes: int) -> None:
    """The best five and the chosen one."""
    found.sort(key=lambda row: row[0])
    picked = found[:5] + [row for row in found[5:] if row[3]]
    cells = [
        f"{micros:.1f} ({key_bytes / BYTES_PER_SECOND / micros * 1e8:.0f} %) {t.keys}/{t.warps}/{t.stages}/{splits}{'*' * mark}"
        for micros, t, splits, mark in picked
    ]
    print(f"  {name}: floor {key_bytes / BYTES_PER_SECOND * 1e6:.1f}  " + " · ".join(cells), flush=True)


def prefill_table() -> None:
    """The Triton configurations, cuDNN with and without gathering, and what else is installed."""
    print("\nprefill, 32/8 heads of 128: TFLOP/s (milliseconds)")
    cases = [(512, 512), (2048, 2048), (8192, 8192), (32768, 32768), (8192, 32768)]
    call, backend = AttentionCall(0.09), TritonAttention()
    small = make_steps([(512, 512)], (32, 8), most=1)
    compile_first([triton_prefill(small, backend.plan(small.spans[0]), call, one) for one in PREFILL_TILES])
    for new, total in cases:
        steps = make_steps([(new, total)], (32, 8), most=1)
        plan = backend.plan(steps.spans[0])
        flops = 4 * 32 * DIM * (new * (total - new) + new * (new + 1) / 2)
        cells = []
        for tiles in PREFILL_TILES:
            mark = "*" if tiles == prefill_tiles(DIM, 4, plan, False) else ""
            name = f"{tiles.rows}x{tiles.keys}/{tiles.warps}/{tiles.stages}{mark}"
            cells.append((timed(triton_prefill(steps, plan, call, tiles)), name))
        cells.sort()
        for name, work in others(steps, plan, call, new, total):
            began = time.perf_counter()
            try:
                work()
            except Exception as failure:  # whatever a library refuses with
                cells.append((float("inf"), f"{name} failed: {str(failure)[:120]}"))
                continue
            torch.cuda.synchronize()
            first = time.perf_counter() - began
            cells.append((timed(work), f"{name} [first call {first * 1000:.0f} ms]"))
        shown = " · ".join(f"{flops / micros / 1e6:.0f} ({micros / 1000:.2f}) {name}" for micros, name in cells)
        print(f"  {new} new of {total}: {shown}", flush=True)
    plan_times(call)


def timed(work: Callable[[], object]) -> float:
    """As `event_microseconds`, infinity if it does not run."""
    try:
        return event_microseconds(work)
    except Exception as failure:  # Triton's own, when a kernel needs more than there is
        print(f"    {type(failure).__name__}: {str(failure)[:160]}")
        return float("inf")


def triton_prefill(steps: Steps, plan: TritonPlan, call: AttentionCall, tiles: TileConfig) -> Callable[[], object]:
    """One launch over the only sequence."""
    return partial(prefill, torch.empty_like(steps.q), steps.q, steps.cache, plan, call, None, (0, 1), tiles)


def others(
    steps: Steps, plan: TritonPlan, call: AttentionCall, new: int, total: int
) -> Iterator[tuple[str, Callable[[], object]]]:
    """(name, one call) of the other kernels; contiguous keys are given to them for free."""
    cudnn = CudnnAttention()
    if new >= 2048:
        yield "cudnn backend", lambda: cudnn.run(steps.q, steps.cache, cudnn.plan(steps.spans[0]), call)
    keys, values = (torch.randn((8, total, DIM), device=DEVICE).to(DTYPE) for _ in range(2))
    is_causal = new == total
    if is_causal:
        yield "cudnn, grouped heads", lambda: attend_dense(steps.q, keys, values, call, is_causal=True)
        wide = [t.repeat_interleave(4, 0) for t in (keys, values)]
        yield "cudnn, repeated heads", lambda: attend_dense(steps.q, *wide, call, is_causal=True)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        q = steps.q.transpose(0, 1)[None]
        yield "torch flash", lambda: flash(q, wide[0][None], wide[1][None], 0.0, True, scale=call.scale)
    else:
        history = total - new
        yield (
            "cudnn, history only",
            lambda: attend_dense(steps.q, keys[:, :history], values[:, :history], call, is_causal=False),
        )
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError as reason:
        print(f"    FlashAttention-4 not available: {reason}")
        return
    packed = [steps.q[None], keys.transpose(0, 1)[None].contiguous(), values.transpose(0, 1)[None].contiguous()]
    yield "FlashAttention-4", lambda: flash_attn_func(*packed, softmax_scale=call.scale, causal=True)


def plan_times(call: AttentionCall) -> None:
    """What the first call of a new shape costs in cuDNN."""
    times = []
    for rows in (2560, 3072, 3584, 4608):
        q = torch.randn((rows, 32, DIM), device=DEVICE).to(DTYPE)
        keys = torch.randn((8, rows, DIM), device=DEVICE).to(DTYPE)
        torch.cuda.synchronize()
        began = time.perf_counter()
        try:
            attend_dense(q, keys, keys, call, is_causal=True)
        except RuntimeError as failure:
            print(f"  cuDNN: {str(failure)[:200]}")
            return
        torch.cuda.synchronize()
        times.append(f"{(time.perf_counter() - began) * 1000:.0f}")
    print(f"  cuDNN, first call of each of four new shapes: {', '.join(times)} ms")


def main() -> None:
    """All parts, or those named."""
    torch.manual_seed(0)
    parts = {
        "check": check,
        "decode": decode_grid,
        "long": decode_long,
        "overlap": neighbours,
        "prefill": prefill_table,
    }
    for name in sys.argv[1:] or list(parts):
        began = time.perf_counter()
        parts[name]()
        torch.cuda.empty_cache()
        print(f"[{name}: {time.perf_counter() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
