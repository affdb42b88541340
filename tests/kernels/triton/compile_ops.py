"""Compiles every Triton implementation and the attention kernels for one architecture, on any machine.

Run as `python -m tests.kernels.triton.compile_ops sm_90 bfloat16 all` (several of the first two, with commas; or "few"
examples of each) in a process without TRITON_INTERPRET. Prints one JSON object per kernel: owner, kernel, architecture,
dtype, shared memory in bytes, error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from itertools import islice

import torch

from samovar.attention.base import AttentionSpec
from samovar.attention.triton import TritonAttention
from samovar.core.cache_spec import CacheSpec
from samovar.hardware.device import with_architecture
from samovar.kernels import overlap
from samovar.kernels.op import Op, Target, cast_arguments, in_one_line, load_ops
from samovar.kernels.triton_launch import LaunchNotes, compile_each, compiling_for, noting

ATTENTION = (
    AttentionSpec(CacheSpec("full", 2, 128, 2), 8),
    AttentionSpec(CacheSpec("full", 2, 80, 2), 6, has_sinks=True),
    AttentionSpec(CacheSpec("sliding", 2, 64, 2, 100), 8, has_sinks=True),
    AttentionSpec(CacheSpec("full", 1, 256, 2), 4, softcap=50.0),
)


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
    for spec in ATTENTION[:most]:
        yield f"attention.{spec.cache.kind}.{spec.cache.head_dim}", of_attention(spec, architecture, dtype)


def of_op(op: Op[..., object], impl: str, dtype: torch.dtype, most: int | None) -> LaunchNotes:
    """What one implementation launches for `most` of the op's examples."""
    assert op.make_examples is not None
    with noting() as notes:
        for example in islice(op.make_examples(), most):
            op.impls[impl].function(*cast_arguments(example, dtype, "meta"))
    return notes


def of_attention(spec: AttentionSpec, architecture: str, dtype: torch.dtype) -> LaunchNotes:
    """What the attention backend launches for one kind of layer."""
    backend = TritonAttention()
    assert backend.accepts(spec, with_architecture(architecture)) is None
    with noting() as notes:
        for block_size in (16, 32):
            for q, cache, spans, call, sinks in backend.warm_examples(spec, (dtype, dtype), block_size, 0.1):
                backend.run(q, cache, backend.plan(spans), call, sinks)
    return notes


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
                    row = {"owner": owner, "kernel": outcome.launch.name, "arch": architecture, "dtype": name}
                    print(json.dumps({**row, "shared": shared, "error": error}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
