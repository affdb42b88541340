"""Compiles every Triton implementation and the attention kernels for one architecture, on any machine.

Run as `python -m tests.kernels.triton.compile_ops sm_90 bfloat16 all` (several of the first two, with commas; or "few"
examples of each) in a process without TRITON_INTERPRET. Prints one JSON object per kernel: owner, kernel, architecture,
dtype, shared memory in bytes, error, and on Hopper instructions that write what a product under way reads.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from samovar.attention import cudnn
from samovar.attention.base import AttentionSpec
from samovar.attention.triton import TritonAttention, codes_refusal, meta_spans, scales_of
from samovar.core.cache_spec import PACKED, CacheSpec, LatentDims
from samovar.hardware.device import with_architecture
from samovar.kernels import overlap
from samovar.kernels.coded_linear import triton as coded
from samovar.kernels.coded_linear.tiles import dot_tile
from samovar.kernels.coded_weights import KINDS, shape_of
from samovar.kernels.op import Op, Target, cast_arguments, in_one_line, load_ops
from samovar.kernels.rope_write_kv.triton import rope_write_kv_triton
from samovar.kernels.triton_launch import Compiled, LaunchNotes, compile_each, compiling_for, noting
from samovar.kernels.write_kv.layout import layer_cache
from samovar.kernels.write_kv.triton import write_kv_triton
from tests.kernels.triton import sass

ATTENTION = (
    AttentionSpec(CacheSpec("full", 2, 128, 2), 8),
    AttentionSpec(CacheSpec("full", 2, 80, 2), 6, has_sinks=True),
    AttentionSpec(CacheSpec("sliding", 2, 64, 2, 100), 8, has_sinks=True),
    AttentionSpec(CacheSpec("full", 1, 256, 2), 4, softcap=50.0),
    AttentionSpec(CacheSpec("full", 1, 512, 2), 4),
    AttentionSpec(CacheSpec("full", 2, 128, 2, chunk=8192), 10),
    *(
        AttentionSpec(CacheSpec("latent", 1, 576, 2, latent=LatentDims(512, 64, 128, 128)), heads)
        for heads in (16, 128)
    ),
    AttentionSpec(CacheSpec("latent", 1, 576, 2, latent=LatentDims(512, 64, 192, 256)), 20),
)
CODED = {
    "int8": (CacheSpec("full", 2, 128, 1, scale_bytes=4), torch.int8),
    "fp8_e4m3": (CacheSpec("full", 2, 128, 1), torch.float8_e4m3fn),
    "fp8_e5m2": (CacheSpec("sliding", 2, 80, 1, 100, is_e5m2=True), torch.float8_e5m2),
    **{kind: (CacheSpec("full", 2, 128, 1, packed=kind), torch.uint8) for kind in PACKED},
}
"""Caches of codes: written, read and gathered."""


def launches(architecture: str, dtype: torch.dtype, most: int | None) -> Iterator[tuple[str, LaunchNotes]]:
    """(owner, its launches) for every implementation that accepts the architecture, and for attention.

    `most` examples of each op, and kinds of attention.
    """
    overlap.adapt(architecture)
    for deterministic in (False, True)[:most]:
        target = Target("cuda", architecture, dtype, deterministic)
        for op in load_ops("cuda").values():
            for impl in op.impls.values():
                if impl.name.startswith("triton") and impl.refusal(target) is None:
                    yield f"{op.name}.{impl.name}", of_op(op, impl.name, dtype, most)
    if dtype is torch.bfloat16:
        yield "coded_linear.tiles", of_tiles(most)
    for spec in ATTENTION[:most]:
        yield f"attention.{spec.cache.kind}.{spec.cache.head_dim}", of_attention(spec, architecture, (dtype, dtype))
    for kind, (cache, stored) in list(CODED.items())[:most]:
        spec = AttentionSpec(cache, 8)
        if codes_refusal(cache, with_architecture(architecture)) is None:
            yield f"attention.{kind}", of_attention(spec, architecture, (dtype, stored))
            yield f"write_kv.{kind}", of_writes(cache, dtype, stored)


def of_op(op: Op[..., object], impl: str, dtype: torch.dtype, most: int | None) -> LaunchNotes:
    """What one implementation launches for `most` of the op's examples."""
    assert op.make_examples is not None
    with noting() as notes:
        for example in islice(op.make_examples(), most):
            op.impls[impl].function(*cast_arguments(example, dtype, "meta"))
    return notes


def of_tiles(most: int | None) -> LaunchNotes:
    """Products with packed weights of a large model, the widest tile first."""
    x = torch.empty(128, 4096, dtype=torch.bfloat16, device="meta")
    with noting() as notes:
        for kind, made in list(KINDS.items())[-most if most else 0 :]:
            row_bricks, input_bricks = shape_of(6144, 4096, kind)
            codes, scale = (
                torch.empty(row_bricks, input_bricks, words, dtype=torch.int32, device="meta")
                for words in (128, 16 * made.words)
            )
            for width in (128, 64, 32, 16, 8)[:most]:
                tile = dot_tile(width, 6144, 4096)
                assert tile is not None
                weight = codes, scale, torch.empty(6144, device="meta"), kind
                coded.multiply(tile, x[:width], weight, x.new_empty(width, 6144))
    return notes


def of_writes(spec: CacheSpec, dtype: torch.dtype, stored: torch.dtype) -> LaunchNotes:
    """What writes rows of `dtype` as codes, and what gathers them again."""
    _, cache = layer_cache(spec, (4, 16), stored, "meta", is_head_major=True)
    heads, dim = spec.num_kv_heads, spec.head_dim
    qkv, slots = torch.empty((5, 3 * heads, dim), dtype=dtype, device="meta"), torch.empty(5, dtype=torch.int64)
    tables = (torch.empty((5, 1, dim), dtype=dtype, device="meta") for _ in range(2))
    with noting() as notes:
        write_kv_triton(qkv[:, :heads], qkv[:, heads : 2 * heads], *cache[:2], slots.to("meta"), *scales_of(cache))
        if spec.packed is None:
            norms = (None, None, 0.0)
            rope_write_kv_triton(qkv, *tables, *cache[:2], slots.to("meta"), *norms, heads, *scales_of(cache))
        cudnn.gather(qkv[:, :heads], cache, TritonAttention().plan(meta_spans(5, 40)), 0, 0, 64, 1)
    return notes


def of_attention(spec: AttentionSpec, architecture: str, dtypes: tuple[torch.dtype, torch.dtype]) -> LaunchNotes:
    """What the attention backend launches for one kind of layer; `dtypes` of queries and of the cache."""
    backend = TritonAttention()
    assert backend.accepts(spec, with_architecture(architecture)) is None
    with noting() as notes:
        for block_size in (16, 32):
            for q, cache, spans, call, sinks in backend.warm_examples(spec, dtypes, block_size, 0.1):
                backend.run(q, cache, backend.plan(spans), call, sinks)
    return notes


def overwritten(outcome: Compiled) -> list[str]:
    """See `sass.overwritten`."""
    if outcome.kernel is None or "wgmma" not in outcome.kernel.asm["ptx"]:
        return []
    with TemporaryDirectory() as folder:
        return sass.overwritten(sass.disassembled(outcome.kernel.asm["cubin"], Path(folder)))


def main(architectures: str, dtypes: str, amount: str) -> None:
    """Compile and print."""
    torch.manual_seed(0)
    for architecture in architectures.split(","):
        facts = with_architecture(architecture)
        for name in dtypes.split(","):
            if name == "bfloat16" and not facts.has_fast_bf16:
                continue
            for owner, notes in launches(architecture, getattr(torch, name), 1 if amount == "few" else None):
                with compiling_for(int(architecture.removeprefix("sm_"))):
                    report = compile_each(notes, 2)
                for outcome in report.outcomes:
                    shared = None if outcome.kernel is None else outcome.kernel.metadata.shared
                    error = None if outcome.error is None else in_one_line(outcome.error)
                    row: dict[str, object] = {"owner": owner, "kernel": outcome.launch.name, "arch": architecture}
                    row["dtype"] = name
                    row |= {"shared": shared, "error": error, "overwritten": overwritten(outcome)[:3]}
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
