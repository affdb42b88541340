"""Products with weights on a GPU: correct at real sizes, tile by tile against cuBLAS, and as whole decode steps.

PYTHONPATH=. python3 benchmarks/gpu/linear.py [check] [gemv] [dot] [stack], all by default. Times are medians of graph
replays over more weights than the L2 cache holds; fractions are of the bytes of weights at 4.3 TB/s.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn.functional import linear as dense

from samovar.kernels import overlap
from samovar.kernels.linear import tiles
from samovar.kernels.linear import triton as products
from samovar.kernels.linear.tiles import DotTile, GemvTile, dot_tile, gemv_tile
from samovar.kernels.linear_add.triton import linear_add_fixed, linear_add_triton
from samovar.kernels.logits.triton import logits_fixed, logits_triton
from samovar.kernels.norm_gated_linear.triton import norm_gated_linear_fixed, norm_gated_linear_triton
from samovar.kernels.norm_linear.triton import norm_linear_fixed, norm_linear_triton
from samovar.kernels.rms_norm.triton import rms_norm_triton
from samovar.kernels.silu_mul.triton import silu_mul_triton
from samovar.kernels.triton_launch import compile_each, noting

MODELS = {  # hidden, qkv, inputs of o, ffn, vocabulary, layers
    "llama-8b": (4096, 6144, 4096, 14336, 128256, 32),
    "qwen3-0.6b": (1024, 4096, 2048, 3072, 151936, 28),
}
BANDWIDTH = 4.3e12
GEMV_TILES = [  # rows in all, columns, warps
    (1, 2048, 4),
    (1, 4096, 4),
    (2, 1024, 4),
    (2, 2048, 4),
    (4, 512, 4),
    (4, 1024, 4),
    (4, 2048, 8),
    (8, 512, 4),
    (8, 1024, 8),
]
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
Run = Callable[[], Any]


def random(*shape: int) -> torch.Tensor:
    """bfloat16 with a standard deviation of 0.02 for weights, 1 for a few rows."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * (0.02 if shape[0] > 512 else 1.0)


def prepare(runs: Sequence[Run]) -> None:
    """Compile what the runs launch, side by side."""
    with noting() as notes:
        for run in runs:
            run()
    report = compile_each(notes, os.cpu_count() or 1)
    print(report, *(f"FAILED {each.launch.options}: {each.error}" for each in report.failures), flush=True)


def timed(run: Run, replays: int = 4, repeats: int = 5) -> float:
    """Seconds of one replay of a graph of `run`."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / replays / 1e3)
    return statistics.median(times)


def attempt(run: Run) -> float:
    """`timed`, or infinity for a tile that the chip does not take."""
    try:
        return timed(run)
    except Exception as error:  # Triton raises many kinds: the table goes on without this tile
        print("  failed:", str(error).splitlines()[0][:100])
        return float("inf")


def shapes(model: str) -> Iterator[tuple[str, int, int, int]]:
    """(name, rows of each part, inputs, parts) of the weights of one layer, and the head."""
    h, qkv, o, f, v, _ = MODELS[model]
    yield from (("qkv", qkv, h, 1), ("o", h, o, 1), ("gate_up", f, h, 2), ("down", h, f, 1), ("head", v, h, 1))


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((got.float() - expected).norm() / expected.norm())


def check(model: str) -> None:
    """Every op against float32 at real sizes; fixed results bit by bit at several batch sizes."""
    h, qkv, o, f, v, _ = MODELS[model]
    gain = torch.rand(h, device="cuda", dtype=torch.bfloat16)
    w_qkv, w_o, w_up, w_down, w_head = random(qkv, h), random(h, o), random(2 * f, h), random(h, f), random(v, h)
    whole = {k: random(200, k) for k in {h, o, f}}
    base = random(200, h)
    worst, results = 0.0, {}
    torch.cuda.synchronize()
    for tokens in (1, 2, 7, 16, 17, 33, 64, 65, 200):
        x, a, m = whole[h][:tokens], whole[o][:tokens], whole[f][:tokens]
        normed = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6) * gain.float()
        gate, up = (normed @ w_up.float().t()).chunk(2, -1)
        expected = [
            normed @ w_qkv.float().t(),
            base[:tokens].float() + a.float() @ w_o.float().t(),
            torch.nn.functional.silu(gate) * up,
            base[:tokens].float() + m.float() @ w_down.float().t(),
            x.float() @ w_head.float().t(),
        ]
        for fixed in (False, True):
            add, norm = (linear_add_fixed, norm_linear_fixed) if fixed else (linear_add_triton, norm_linear_triton)
            gated = norm_gated_linear_fixed if fixed else norm_gated_linear_triton
            r_o, r_down = base[:tokens].clone(), base[:tokens].clone()
            add(a, w_o, r_o)
            add(m, w_down, r_down)
            head = (logits_fixed if fixed else logits_triton)(x, w_head)
            got = [norm(x, gain, 1e-6, w_qkv), r_o, gated(x, gain, 1e-6, w_up, "silu"), r_down, head]
            errors = [error(g, e) for g, e in zip(got, expected, strict=True)]
            worst = max(worst, *errors)
            if max(errors) > 1e-2:
                print(f"  WRONG {model} tokens={tokens} fixed={fixed}", [f"{e:.1e}" for e in errors])
            if fixed:
                results[tokens] = got
    same = all(torch.equal(g, w[:t]) for t, got in results.items() for g, w in zip(got, results[200], strict=True))
    print(f"{model}: worst relative error {worst:.1e}; fixed alike at every batch size: {same}", flush=True)


class Weights:
    """Copies of one weight that together exceed the L2 cache, and one input for all."""

    def __init__(self, n: int, k: int, parts: int) -> None:
        self.n, self.parts, self.bytes = n, parts, 2 * n * k * parts
        self.copies = [random(n * parts, k) for _ in range(max(2, -(-250_000_000 // self.bytes)))]
        self.x = random(256, k)

    def cublas(self, tokens: int) -> None:
        """One product per copy; the activation, too."""
        for weight in self.copies:
            y = dense(self.x[:tokens], weight)
            if self.parts == 2:
                silu_mul_triton(y)

    def ours(self, tokens: int, tile: GemvTile | DotTile) -> None:
        """The same with a tile."""
        for weight in self.copies:
            x = self.x[:tokens]
            products.multiply(tile, x, weight, x.new_empty(tokens, self.n), gate="silu" if self.parts == 2 else None)

    def line(self, seconds: float) -> str:
        """Microseconds of one product and the fraction of the bandwidth."""
        each = seconds / len(self.copies)
        return f"{each * 1e6:7.1f} {self.bytes / each / BANDWIDTH:4.0%}"


def gemv(model: str) -> None:
    """One token: us and fraction of the bandwidth of cuBLAS, the chosen tile and the best one."""
    held = {name: (Weights(n, k, parts), n, k, parts) for name, n, k, parts in shapes(model)}

    def tiles_of(k: int, parts: int) -> list[GemvTile]:
        scaled = [GemvTile(rows // parts, columns, warps) for rows, columns, warps in GEMV_TILES if rows >= parts]
        return [tile for tile in scaled if tile.columns < 2 * k]

    prepare([partial(w.ours, 1, t) for w, n, k, p in held.values() for t in [*tiles_of(k, p), gemv_tile(n, k, p)]])
    for name, (weights, n, k, parts) in held.items():
        weights.cublas(1)
        chosen = gemv_tile(n, k, parts)
        times = {tile: attempt(partial(weights.ours, 1, tile)) for tile in {*tiles_of(k, parts), chosen}}
        order = sorted(times, key=lambda tile: times[tile])
        row = f"{model} {name:8} [{n * parts}, {k}] cuBLAS {weights.line(timed(partial(weights.cublas, 1)))}"
        row += f" | chosen {(chosen.rows, chosen.columns, chosen.warps)} {weights.line(times[chosen])} | best"
        print(row, *(f"{(t.rows, t.columns, t.warps)} {weights.line(times[t])};" for t in order[:3]), flush=True)


def dot_tiles(tokens: int, n: int, k: int, parts: int) -> list[DotTile]:
    """Tiles worth trying."""
    width, found = max(16, tiles.power_of_two(tokens)), {dot_tile(tokens, n, k, parts)}
    for wide in {width, min(width, 128)}:
        for rows in (16, 32, 64, 128):
            for splits in (1, 2, 3, 4):
                programs = -(-n // rows) * splits * -(-tokens // wide)
                total = rows * parts
                if (
                    rows * 4 < wide
                    or total > 256
                    or not 48 <= programs <= (400 if splits > 1 else 1200 if rows < 64 else 1 << 30)
                ):
                    continue
                if splits > 1 and (parts > 1 or wide == 16):
                    continue
                depth = 128 if wide <= 32 else 64
                warps = 8 if total * wide >= 128 * 128 else 4
                for stages in (3, 4):
                    if stages * depth * (wide + total) * 2 <= 220 << 10:
                        found.add(DotTile(wide, rows, depth, splits, warps, stages))
    return sorted(found, key=str)


def dot(model: str) -> None:
    """A few tokens: cuBLAS, the chosen tile and the best ones."""
    batches = (16, 32, 64, 128, 256)
    held = {name: (Weights(n, k, parts), n, k, parts) for name, n, k, parts in shapes(model) if name != "head"}
    prepare([partial(w.ours, m, t) for w, n, k, p in held.values() for m in batches for t in dot_tiles(m, n, k, p)])
    for name, (weights, n, k, parts) in held.items():
        for tokens in batches:
            chosen = dot_tile(tokens, n, k, parts)
            times = {t: attempt(partial(weights.ours, tokens, t)) for t in dot_tiles(tokens, n, k, parts)}
            order = sorted(times, key=lambda tile: times[tile])
            row = f"{model} {name:8} M={tokens:3} cuBLAS {weights.line(timed(partial(weights.cublas, tokens)))}"
            row += f" | chosen {short(chosen)} {weights.line(times[chosen])} | best"
            print(row, *(f"{short(t)} {weights.line(times[t])};" for t in order[:3]), flush=True)


def short(tile: DotTile) -> str:
    """tokens x rows x depth, splits, warps, stages."""
    return f"{tile.tokens}x{tile.rows}x{tile.depth} k{tile.splits} w{tile.warps} s{tile.stages}"


class Stack:
    """The products of one decode step with everything around them but attention."""

    def __init__(self, model: str) -> None:
        h, qkv, self.o, self.f, v, layers = MODELS[model]
        self.layers = [
            (random(qkv, h), random(h, self.o), random(2 * self.f, h), random(h, self.f)) for _ in range(layers)
        ]
        self.head, self.gain = random(v, h), torch.rand(h, device="cuda", dtype=torch.bfloat16)
        self.bytes = 2 * (sum(w.numel() for layer in self.layers for w in layer) + self.head.numel())
        self.hidden = random(256, h)
        self.attended = random(256, self.o)

    def cublas(self, tokens: int) -> None:
        """Norms and activations in Triton, products in cuBLAS."""
        x, a = self.hidden[:tokens], self.attended[:tokens]
        for w_qkv, w_o, w_up, w_down in self.layers:
            dense(rms_norm_triton(x, self.gain, 1e-6), w_qkv)
            x.addmm_(a, w_o.t())
            x.addmm_(silu_mul_triton(dense(rms_norm_triton(x, self.gain, 1e-6), w_up)), w_down.t())
        torch.mm(rms_norm_triton(x, self.gain, 1e-6), self.head.t(), out_dtype=torch.float32)

    def ours(self, tokens: int) -> None:
        """The ops as a bound model calls them."""
        x, a = self.hidden[:tokens], self.attended[:tokens]
        for w_qkv, w_o, w_up, w_down in self.layers:
            norm_linear_triton(x, self.gain, 1e-6, w_qkv)
            linear_add_triton(a, w_o, x)
            linear_add_triton(norm_gated_linear_triton(x, self.gain, 1e-6, w_up, "silu"), w_down, x)
        logits_triton(rms_norm_triton(x, self.gain, 1e-6), self.head)


def limited(run: Callable[[int], None], tokens: int, overlaps: bool, normed: int) -> None:
    """`run` with other settings: whether kernels overlap, and the most weights of a product that norms its input."""
    default, tiles.MOST_WEIGHTS_NORMED = tiles.MOST_WEIGHTS_NORMED, normed
    overlap.switch(overlaps)
    run(tokens)
    tiles.MOST_WEIGHTS_NORMED = default
    overlap.switch(can_overlap())


def can_overlap() -> bool:
    """Whether the chip has programmatic dependent launch."""
    return torch.cuda.get_device_capability()[0] >= 9


def stack(model: str) -> None:
    """ms of all products of a step: cuBLAS; our kernels as chosen, with every norm a kernel of its own (which differs for
    one token only), and without overlap."""
    held = Stack(model)
    ways: dict[str, Callable[[int], None]] = {
        "chosen": held.ours,
        "norm apart": lambda m: limited(held.ours, m, True, 0),
        "no overlap": lambda m: limited(held.ours, m, False, tiles.MOST_WEIGHTS_NORMED),
    }
    prepare([partial(held.cublas, 1)] + [partial(way, m) for way in ways.values() for m in TOKENS])
    print(f"{model}: {held.bytes / 1e9:.2f} GB, at 4.3 TB/s {held.bytes / BANDWIDTH * 1e3:.3f} ms; ms per step:")
    print(f"{'tokens':>8}{'cuBLAS':>12}" + "".join(f"{way:>12}" for way in ways))
    for tokens in TOKENS:
        times = [timed(partial(held.cublas, tokens)), *(attempt(partial(way, tokens)) for way in ways.values())]
        print(f"{tokens:8}" + "".join(f"{seconds * 1e3:12.3f}" for seconds in times), flush=True)


def main(wanted: list[str]) -> None:
    """Run the parts that are wanted."""
    torch.manual_seed(0)
    overlap.switch(can_overlap())
    parts: dict[str, Callable[[str], None]] = {"check": check, "gemv": gemv, "stack": stack, "dot": dot}
    for name, part in parts.items():
        if not wanted or name in wanted:
            began = time.perf_counter()
            for model in MODELS:
                part(model)
                torch.cuda.empty_cache()
            print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
