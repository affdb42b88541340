"""Times the Triton kernels around the products: norms, activations, rotary embedding, the K/V write, decode inputs.

    PYTHONPATH=. python3 benchmarks/gpu/elementwise.py [--quick]

First each kernel is compared with its reference at every size. The first table then gives microseconds per launch inside
a CUDA graph, and in brackets the share of the copy bandwidth that this is: the bytes that must be read and written, at
4.3 TB/s, over the time. Launches rotate over sets of buffers larger than the L2 cache where one set is not tiny; small
inputs lie in the cache, as they do in a decode step. The first row tells what a launch costs by itself. The
second table times other tiles than those in use, which are marked with a star; --quick leaves it out.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from samovar.kernels.add_rms_norm.triton import add_rms_norm_in
from samovar.kernels.op import OPS, load_ops
from samovar.kernels.rms_norm.triton import NormTile, norm_tile
from samovar.kernels.rope.triton import HeadTile, head_tile
from samovar.kernels.rope_write_kv.triton import rope_write_kv_in
from samovar.kernels.silu_mul.triton import GateTile, gate_tile, gated

COPY_BYTES_PER_SECOND = 4.3e12
L2_BYTES = 60 << 20
BLOCK_SIZE = 16
DTYPE = torch.bfloat16
TOKENS = (1, 32, 256, 2048, 8192)
DEVICE = "cuda"


class Shape(NamedTuple):
    """The sizes of one model."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    has_qk_norm: bool


SHAPES = (
    Shape("llama-8b", 4096, 32, 8, 128, 14336, False),
    Shape("qwen3-0.6b", 1024, 16, 8, 128, 3072, True),
)


@dataclass
class Case:
    """One op at one size: `make` gives fresh arguments, `moved` counts the bytes that must cross the memory bus."""

    op: str
    shape: Shape
    tokens: int
    make: Callable[[], tuple[Any, ...]]
    moved: int

    @property
    def function(self) -> Callable[..., Any]:
        """The Triton implementation."""
        function: Callable[..., Any] = OPS[self.op].impls["triton"].function
        return function


def randn(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, device=DEVICE, dtype=dtype)


def qkv_arguments(shape: Shape, tokens: int) -> tuple[Any, ...]:
    """Those of `rope_write_kv`."""
    heads, kv_heads, dim = shape.heads, shape.kv_heads, shape.head_dim
    angle = torch.rand(tokens, 1, dim // 2, device=DEVICE) * 6
    cos, sin = torch.cat((angle.cos(),) * 2, -1).to(DTYPE), torch.cat((-angle.sin(), angle.sin()), -1).to(DTYPE)
    blocks = tokens // BLOCK_SIZE + 2
    caches = (randn(blocks, kv_heads, BLOCK_SIZE, dim).transpose(1, 2) for _ in range(2))
    slots = torch.randperm(blocks * BLOCK_SIZE, device=DEVICE)[:tokens].sort().values
    weights = (randn(dim) / 4 + 1, randn(dim) / 4 + 1) if shape.has_qk_norm else (None, None)
    return randn(tokens, heads + 2 * kv_heads, dim), cos, sin, *caches, slots, *weights, 1e-6, heads


def rope_arguments(shape: Shape, tokens: int) -> tuple[Any, ...]:
    """Those of `rope`: views into a joint projection."""
    qkv, cos, sin, *_ = qkv_arguments(shape, tokens)
    q, k, _ = torch.split(qkv, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    return q, k, cos, sin


def write_arguments(shape: Shape, tokens: int) -> tuple[Any, ...]:
    """Those of `write_kv`: views into a joint projection."""
    qkv, _, _, keys, values, slots, *_ = qkv_arguments(shape, tokens)
    _, k, v = torch.split(qkv, [shape.heads, shape.kv_heads, shape.kv_heads], dim=1)
    return k, v, keys, values, slots


def decode_arguments(rows: int) -> tuple[Any, ...]:
    """Those of `decode_inputs`, with one padding row if there are several."""
    packed = torch.randint(0, 256, (4, rows), dtype=torch.int32, device=DEVICE)
    packed[2, ::2] = -1
    packed[1, 1:2] = -1
    tables = torch.randint(0, 10_000, (257, 512), dtype=torch.int32, device=DEVICE)
    written = (torch.empty(rows, dtype=kind, device=DEVICE) for kind in (torch.int64,) * 3 + (torch.int32,))
    return packed, torch.randint(0, 1000, (257,), device=DEVICE), tables, BLOCK_SIZE, *written


def cases(shape: Shape, tokens: int) -> Iterator[Case]:
    """Every op at one size."""
    size, t, d, f = DTYPE.itemsize, tokens, shape.hidden, shape.ffn
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    table = 2 * shape.head_dim
    case = partial(Case, shape=shape, tokens=tokens)
    yield case("rms_norm", make=lambda: (randn(t, d), randn(d), 1e-6), moved=t * 2 * d * size)
    yield case("add_rms_norm", make=lambda: (randn(t, d), randn(t, d), randn(d), 1e-6), moved=t * 4 * d * size)
    yield case("silu_mul", make=lambda: (randn(t, 2 * f),), moved=t * 3 * f * size)
    yield case("gelu_mul", make=lambda: (randn(t, 2 * f),), moved=t * 3 * f * size)
    yield case("rope", make=lambda: rope_arguments(shape, t), moved=t * (2 * (q + kv) + table) * size)
    yield case("write_kv", make=lambda: write_arguments(shape, t), moved=t * 4 * kv * size)
    moved = t * (2 * (q + 2 * kv) + table) * size
    yield case("rope_write_kv", make=lambda: qkv_arguments(shape, t), moved=moved)
    frequencies = 10000.0 ** -(torch.arange(shape.head_dim // 2, device=DEVICE) / (shape.head_dim // 2))
    positions = torch.arange(1000, 1000 + t, device=DEVICE)
    yield case("rope_table", make=lambda: (positions, frequencies, 1.0, DTYPE), moved=t * (8 + table * size))
    if tokens <= 256:
        yield case("decode_inputs", make=lambda: decode_arguments(t), moved=t * 44)


def difference(case: Case) -> str | None:
    """What sets the implementation apart from the reference; None if they agree."""
    op, given = OPS[case.op], case.make()
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in given]
    results = []
    for run, arguments in ((op.reference, copies), (case.function, given)):
        result = run(*arguments)
        names = op.reference.__code__.co_varnames
        written = [arguments[names.index(name)] for name in op.mutates]
        results.append([*(result if isinstance(result, tuple) else () if result is None else (result,)), *written])
    # A table is rounded to 16 bits at the end; its op's tolerance is that of float32.
    absolute, relative = op.tolerance_of(DTYPE) if case.op != "rope_table" else (1e-6, torch.finfo(DTYPE).eps)
    for expected, got in zip(*results, strict=True):
        error = (got.double() - expected.double()).abs()
        if not bool((error <= absolute + relative * expected.double().abs()).all()):
            return f"largest error {float(error.max()):.3g}"
    return None


def microseconds(function: Callable[..., Any], make: Callable[[], tuple[Any, ...]], moved: int) -> float:
    """Median time of one launch among many in a graph."""
    sets = [make() for _ in range(max(1, min(16, -(-2 * L2_BYTES // max(1, moved)))))]
    launches = 64 if moved < 16 << 20 else 16
    for arguments in sets[:2]:
        function(*arguments)
    torch.cuda.synchronize()
    graph, kept = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for at in range(launches):
            # Results are kept, or all launches would write to one place that stays in the cache.
            kept.append(function(*sets[at % len(sets)]))
    times = []
    for _ in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / launches)
    return float(statistics.median(times[1:]))


def cell(time: float, moved: int) -> str:
    """Microseconds and the share of the bandwidth."""
    return f"{time:8.2f} ({100 * moved / COPY_BYTES_PER_SECOND * 1e6 / time:3.0f}%)"


def tiles(shape: Shape, tokens: int) -> Iterator[tuple[str, Any, bool, Callable[..., Any], Case]]:
    """(op, tile, whether it is in use, the op with this tile, the case) for every tile worth a look."""
    by_op = {case.op: case for case in cases(shape, tokens)}
    columns = norm_tile(shape.hidden).columns
    norms = [NormTile(1, columns, warps) for warps in (2, 4, 8, 16)]
    norms += [NormTile(rows, columns, 4 * rows) for rows in (2, 4) if columns <= 1024]
    for norm in norms:
        run: Callable[..., Any] = partial(add_rms_norm_in, norm)
        yield "add_rms_norm", tuple(norm), norm == norm_tile(shape.hidden), run, by_op["add_rms_norm"]
    for gate in (GateTile(512, 2), GateTile(1024, 2), GateTile(1024, 4), GateTile(2048, 4), GateTile(2048, 8)):
        run = partial(gated, activation="silu", tile=gate)
        yield "silu_mul", tuple(gate), gate == gate_tile(shape.ffn), run, by_op["silu_mul"]

    def turned(tile: HeadTile, *given: Any) -> torch.Tensor:
        return rope_write_kv_in(tile, given[0], given[1:3], given[3:5], given[5], given[6:8], *given[8:])

    for group, warps in ((4, 1), (8, 1), (8, 2), (8, 4), (16, 2), (16, 4), (32, 4), (32, 8)):
        tile = HeadTile(group, warps)
        in_use = tile == head_tile(shape.heads, shape.head_dim)
        yield "rope_write_kv", tuple(tile), in_use, partial(turned, tile), by_op["rope_write_kv"]


def main() -> None:
    """Check, then print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="no table of tiles")
    quick = parser.parse_args().quick
    torch.manual_seed(0)
    load_ops("cuda")
    wrong = 0
    for shape in SHAPES:
        for tokens in TOKENS:
            for case in cases(shape, tokens):
                if found := difference(case):
                    wrong += 1
                    print(f"WRONG {case.op} {shape.name} tokens {tokens}: {found}")
    print(f"compared with the references: {wrong or 'no'} differences\n")
    print(f"{'us in a graph (of 4.3 TB/s)':28}" + "".join(f"{tokens:>16}" for tokens in TOKENS))
    least = microseconds(lambda x: x.add_(1), lambda: (torch.zeros(1, device=DEVICE),), 0)
    print(f"{'torch: x += 1, one element':28}{least:8.2f}")
    for shape in SHAPES:
        rows: dict[str, str] = {}
        for tokens in TOKENS:
            for case in cases(shape, tokens):
                time = cell(microseconds(case.function, case.make, case.moved), case.moved)
                rows[case.op] = rows.get(case.op, "") + f"{time:>16}"
        for name, row in rows.items():
            print(f"{name + ' ' + shape.name:28}{row}")
    if not quick:
        tile_table()


def tile_table() -> None:
    """Times of other tiles, at sizes of decode and of prefill."""
    sizes = (1, 256, 8192)
    print(f"\n{'tile (* in use)':44}" + "".join(f"{tokens:>16}" for tokens in sizes))
    for shape in SHAPES:
        rows: dict[str, str] = {}
        for tokens in sizes:
            for op, tile, in_use, function, case in tiles(shape, tokens):
                label = f"{op} {shape.name} {tile}{' *' if in_use else ''}"
                time = microseconds(function, case.make, case.moved)
                rows[label] = rows.get(label, "") + f"{cell(time, case.moved):>16}"
        for label, row in rows.items():
            print(f"{label:44}{row}")


if __name__ == "__main__":
    main()
