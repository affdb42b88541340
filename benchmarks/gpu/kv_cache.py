"""Types of caches on a GPU: each against the reference, then decode and prefill by type beside bfloat16.

PYTHONPATH=. python3 benchmarks/gpu/kv_cache.py [check] [decode] [prefill] [tiles], all but the last by default. As
`benchmarks/gpu/attention.py` measures: decode in graph replays over more keys than the L2 cache holds, percentages of
4.3 TB/s, prefill in TFLOP/s. "x" is the speed beside bfloat16. `tiles` tries every tile of the decode kernel.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.attention import (
    BYTES_PER_SECOND,
    DEVICE,
    DIM,
    DTYPE,
    Steps,
    compile_first,
    decode_work,
    make_steps,
    measured,
    timed,
)
from samovar.attention.base import AttentionCall
from samovar.attention.cudnn import CudnnAttention
from samovar.attention.reference import ReferenceAttention
from samovar.attention.triton import TileConfig, TritonAttention, decode_tiles, is_long, scales_of
from samovar.core.cache_spec import PACKED, CacheSpec
from samovar.kernels.write_kv import write_kv
from samovar.kernels.write_kv.rows import bits_of
from samovar.kernels.write_kv.triton import write_kv_triton

HEADS = (32, 8)
TYPES: dict[str, tuple[CacheSpec, torch.dtype]] = {
    "bf16": (CacheSpec("full", HEADS[1], DIM, 2), torch.bfloat16),
    "e4m3": (CacheSpec("full", HEADS[1], DIM, 1), torch.float8_e4m3fn),
    "e5m2": (CacheSpec("full", HEADS[1], DIM, 1, is_e5m2=True), torch.float8_e5m2),
    "int8": (CacheSpec("full", HEADS[1], DIM, 1, scale_bytes=4), torch.int8),
    **{name: (CacheSpec("full", HEADS[1], DIM, 1, packed=name), torch.uint8) for name in PACKED},
}
SHAPES = [(batch, context) for batch in (1, 32, 128) for context in (1024, 4096, 32768)]
TILES = [
    *(TileConfig(keys, 4, stages) for keys in (32, 64, 128) for stages in (2, 3, 4)),
    *(TileConfig(keys, 2, stages) for keys in (32, 64) for stages in (3, 4)),
    *(TileConfig(128, 8, stages) for stages in (2, 3)),
    TileConfig(256, 8, 2),
]
CALL = AttentionCall(0.09)


def steps_of(name: str, sizes: list[tuple[int, int]], most: int = 64) -> Steps:
    """Sequences of (new, total) tokens over a cache of one type."""
    return make_steps(sizes, HEADS, page=32, most=most, coded=TYPES[name])


def check() -> None:
    """Written by the kernel as by the reference; read by the kernels as by the reference; and what storing costs."""
    print("\ncheck: codes that differ from the reference's; error of attention against the reference over the same")
    print("cache, relative to the largest value; error of that against numbers in 16 bits, relative to the norm")
    sizes = [*((1, total) for total in (1, 64, 577, 4000, 9000)), (300, 900), (2500, 11000), (4200, 4200)]
    for name in TYPES:
        steps = steps_of(name, sizes, most=1)
        spans, page = steps.spans[0], 32
        slots = torch.cat([spans.block_tables[i, : -(-total // page)] for i, (_, total) in enumerate(sizes)])
        slots = (slots.long()[:, None] * page + torch.arange(page, device=DEVICE)).flatten()
        k, v = torch.randn((2, len(slots), HEADS[1], DIM), device=DEVICE).to(DTYPE)
        exact = steps_of("bf16", sizes, most=1)
        write_kv(k, v, exact.cache[0], exact.cache[1], slots)
        exact.spans[:] = steps.spans
        write_kv(k, v, steps.cache[0], steps.cache[1], slots, *scales_of(steps.cache))
        stored = [tensor.clone() for tensor in steps.cache]
        write_kv_triton(k, v, steps.cache[0], steps.cache[1], slots, *scales_of(steps.cache))
        differ = sum(int((a != b).sum()) for a, b in zip(stored, steps.cache, strict=True))
        expected, truth = (one_by_one(s, steps.q.float()) for s in (steps, exact))
        cells = [f"{differ} differ"]
        for backend in (TritonAttention(), CudnnAttention()):
            got = backend.run(steps.q, steps.cache, backend.plan(spans), CALL).float()
            cells.append(f"{backend.name} {float((got - expected).abs().max() / expected.abs().max()):.1e}")
        cells.append(f"cache {float((expected - truth).norm() / truth.norm()):.1e}")
        print(f"  {name}: " + " · ".join(cells), flush=True)


def one_by_one(steps: Steps, q: torch.Tensor) -> torch.Tensor:
    """The reference in float32."""
    backend = ReferenceAttention()
    return backend.run(q, steps.cache, backend.plan(steps.spans[0]), CALL)


def work_of(steps: Steps, context: int) -> list[Callable[[], object]]:
    """Decode as the backend does it, one launch for each of `steps`."""
    splits = TritonAttention().splits(steps.spans[0].total_tokens, HEADS[1], None)
    return decode_work(steps, splits, tiles_of(steps, context, splits))


def tiles_of(steps: Steps, context: int, splits: int) -> TileConfig:
    """What the backend takes."""
    return decode_tiles(DIM, False, splits, is_long(context, None), bits_of(steps.cache[1], DIM))


def decode_table() -> None:
    """Batch sizes by lengths by types."""
    print("\ndecode, 32/8 heads of 128, one layer: microseconds (share of 4.3 TB/s) x beside bf16")
    compile_first(
        [
            work_of(steps_of(name, [(1, context)] * batch, 1), context)[0]
            for name in TYPES
            for batch, context in SHAPES[:8]
        ]
    )
    for batch, context in SHAPES:
        cells, plain = [], 0.0
        for name in TYPES:
            steps = steps_of(name, [(1, context)] * batch)
            micros = measured(work_of(steps, context))
            plain = plain or micros
            share = steps.key_bytes / BYTES_PER_SECOND / micros * 1e8
            cells.append(f"{name} {micros:.1f} ({share:.0f} %) x{plain / micros:.2f}")
            del steps
            torch.cuda.empty_cache()
        print(f"  batch {batch} context {context}: " + " · ".join(cells), flush=True)


def prefill_table() -> None:
    """A chunk of 2,048 tokens after histories, and whole prompts; cuDNN where the backend uses it."""
    print("\nprefill, 32/8 heads of 128: TFLOP/s (milliseconds)")
    cases = [(2048, 2048), (8192, 8192), (1024, 3072), (1024, 9216), (2048, 34816), (8192, 40960)]
    for new, total in cases:
        flops = 4 * HEADS[0] * DIM * (new * (total - new) + new * (new + 1) / 2)
        cells = []
        for name in TYPES:
            steps = steps_of(name, [(new, total)], most=1)
            for backend in (TritonAttention(), CudnnAttention()):
                run = partial(backend.run, steps.q, steps.cache, backend.plan(steps.spans[0]), CALL)
                if backend.name == "triton":
                    compile_first([run])
                micros = timed(run)
                cells.append(f"{name} {backend.name} {flops / micros / 1e6:.0f} ({micros / 1000:.2f})")
        print(f"  {new} new of {total}: " + " · ".join(cells), flush=True)


def tile_table() -> None:
    """Every tile at three shapes."""
    print("\ndecode tiles: microseconds keys/warps/stages, best first; a star marks the backend's")
    for name in TYPES:
        for batch, context in ((128, 1024), (128, 4096), (32, 4096), (1, 32768)):
            steps = steps_of(name, [(1, context)] * batch)
            splits = TritonAttention().splits(steps.spans[0].total_tokens, HEADS[1], None)
            if (batch, context) == (128, 1024):
                compile_first([decode_work(steps, one, tiles)[0] for tiles in TILES for one in (1, 16)])
            found = sorted((measured(decode_work(steps, splits, tiles)), tiles) for tiles in TILES)
            chosen = tiles_of(steps, context, splits)
            cells = [
                f"{micros:.1f} {t.keys}/{t.warps}/{t.stages}{'*' * (t == chosen)}"
                for rank, (micros, t) in enumerate(found)
                if rank < 4 or t == chosen
            ]
            print(f"  {name} batch {batch} context {context} splits {splits}: " + " · ".join(cells), flush=True)
            del steps
            torch.cuda.empty_cache()


def main() -> None:
    """All parts, or those named."""
    torch.manual_seed(0)
    parts = {"check": check, "decode": decode_table, "prefill": prefill_table, "tiles": tile_table}
    for name in sys.argv[1:] or list(parts)[:3]:
        began = time.perf_counter()
        parts[name]()
        torch.cuda.empty_cache()
        print(f"[{name}: {time.perf_counter() - began:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
