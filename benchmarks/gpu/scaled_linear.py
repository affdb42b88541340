"""Products of rounded activations with FP8 and int8 weights on a GPU: correct at real sizes, then tile by tile.

PYTHONPATH=. python3 benchmarks/gpu/scaled_linear.py [check] [gemv] [dot] [wide] [stack], all by default; "quick" leaves
out most tiles. Times are medians of graph replays over more weights than the L2 cache holds: us, then GB/s of weights at
4.3 TB/s or TFLOP/s.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch.nn.functional import linear as dense

from benchmarks.gpu.linear import BANDWIDTH, attempt, can_overlap, error, prepare, random, timed
from samovar.kernels import overlap
from samovar.kernels.linear_add.triton import linear_add_triton
from samovar.kernels.norm_gated_linear.triton import norm_gated_linear_triton
from samovar.kernels.norm_linear.triton import norm_linear_triton
from samovar.kernels.quantize_rows import quantize_rows
from samovar.kernels.quantize_rows.triton import quantize
from samovar.kernels.rms_norm import rms_norm
from samovar.kernels.scaled_linear import BLOCK, dequantized, rounded_inputs
from samovar.kernels.scaled_linear import triton as products
from samovar.kernels.scaled_linear.tiles import DotTile, GemvTile, dot_tile, gemv_tile, wide_tile
from samovar.kernels.scaled_linear.triton import Given, fixed_product, multiply, scaled_product

SHAPES = {"qkv": (6144, 4096, 1), "o": (4096, 4096, 1), "gate_up": (14336, 4096, 2), "down": (4096, 14336, 1)}
"""(rows of each part, inputs, parts) of llama-8b."""
KINDS = ("fp8", "int8", "block")
LAYERS = 32


def weight_of(rows: int, k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of a random weight."""
    plain = torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) * 0.02
    if kind != "block":
        codes, scale = quantize(plain, "int8" if kind == "int8" else "fp8")
        return codes.view(torch.uint8) if kind == "fp8" else codes, scale.squeeze(1)
    codes, _ = quantize(plain, "fp8", scale=torch.tensor([0.0003], device="cuda"))
    blocks = (-(-rows // BLOCK), -(-k // BLOCK))
    return codes.view(torch.uint8), 0.0003 * (0.5 + torch.rand(*blocks, device="cuda"))


def expected_of(x: torch.Tensor, given: Given) -> torch.Tensor:
    """float32 result of the same rounded numbers."""
    if given.norm is not None:
        x = rms_norm(x, *given.norm)
    y = rounded_inputs(x, given.weight, given.scale, given.input_scale) @ dequantized(given.weight, given.scale).t()
    if given.bias is not None:
        y += given.bias.float()
    if given.gate is not None:
        gate, up = y.chunk(2, -1)
        y = torch.nn.functional.silu(gate) * up
    return y if given.residual is None else y + given.residual.float()


def cases(tokens: int, kind: str) -> Iterator[tuple[str, torch.Tensor, Given]]:
    """(name, x, what is given) of real shapes, a static scale, and ragged ones."""
    for name, (n, k, parts) in SHAPES.items():
        x = random(4096, k)[:tokens] * 50  # of a standard deviation of one
        norm = (torch.rand(k, device="cuda", dtype=torch.bfloat16), 1e-6) if name in ("qkv", "gate_up") else None
        residual = random(4096, n)[:tokens].clone() if norm is None else None
        weight = weight_of(n * parts, k, kind)
        yield name, x, Given(*weight, residual=residual, norm=norm, gate="silu" if parts == 2 else None)
    if kind != "block":
        x = torch.randn(tokens, 2064, device="cuda", dtype=torch.bfloat16)
        static = torch.tensor([0.01 if kind == "fp8" else 0.03], device="cuda")
        yield "ragged", x, Given(*weight_of(1000, 2064, kind), input_scale=static, bias=random(1000))
    else:
        x = torch.randn(tokens, 2048, device="cuda", dtype=torch.bfloat16)
        yield "ragged", x, Given(*weight_of(1000, 2048, kind), bias=random(1000))


def check() -> None:
    """Every kind and shape against float32; deterministic results bit by bit at several batch sizes; activations."""
    x = torch.randn(300, 4096, device="cuda", dtype=torch.bfloat16) * 3
    for number, group in (("fp8", -1), ("int8", -1), ("fp8", 128), ("int8", 128)):
        codes, scales = quantize(x, number, group=group)  # type: ignore[arg-type]
        wanted, wanted_scales = quantize_rows(x, number, group)  # type: ignore[arg-type]
        same = torch.equal(codes.view(wanted.dtype), wanted) and torch.equal(scales, wanted_scales)
        print(f"quantize_rows {number} {group}: exact {same}")
    torch.backends.cuda.matmul.allow_tf32 = False
    for kind in KINDS:
        worst: dict[str, float] = {}
        for tokens in (0, 1, 2, 7, 16, 17, 33, 64, 65, 130, 1000, 4096):
            for name, x, given in cases(tokens, kind):
                wanted = expected_of(x, given)
                got = scaled_product(x, given)
                if tokens:
                    off = error(got, wanted)
                    if off > (4e-2 if given.norm else 1e-2) or not bool(got.isfinite().all()):
                        print(f"  WRONG {kind} {name} tokens={tokens}: {off:.2e}")
                    worst[name] = max(worst.get(name, 0.0), off)
        print(kind, "worst relative errors", {name: f"{off:.1e}" for name, off in worst.items()}, flush=True)
        check_fixed(kind)


def check_fixed(kind: str) -> None:
    """Rows alike at every batch size, and twice."""
    for name, (n, k, parts) in SHAPES.items():
        x, weight = random(200, k), weight_of(n * parts, k, kind)
        given = Given(*weight, gate="silu" if parts == 2 else None)
        whole = fixed_product(x, given)
        same = all(torch.equal(fixed_product(x[:tokens], given), whole[:tokens]) for tokens in (1, 3, 64, 65, 200))
        again = scaled_product(x[:16], given), scaled_product(x[:16], given)
        if not same or not torch.equal(*again):
            print(f"  WRONG {kind} {name}: fixed alike {same}, twice the same {torch.equal(*again)}")


class Weights:
    """Copies of one weight that together exceed the L2 cache, plain ones beside them, and one input for all."""

    def __init__(self, name: str, kind: str) -> None:
        self.n, self.k, self.parts = SHAPES[name]
        rows, self.bytes = self.n * self.parts, self.n * self.k * self.parts
        count = max(2, -(-200_000_000 // self.bytes))
        self.gate = "silu" if self.parts == 2 else None
        self.copies = [Given(*weight_of(rows, self.k, kind), gate=self.gate) for _ in range(count)]
        self.plain = [random(rows, self.k) for _ in range(max(2, count // 2))]
        self.x = random(8192, self.k)

    def ours(self, tokens: int, tile: GemvTile | DotTile | None) -> None:
        """With a tile, or torch's product."""
        x = self.x[:tokens]
        for given in self.copies:
            multiply(x, given, tile)

    def bf16(self, tokens: int) -> None:
        """Plain weights, as the model would multiply them."""
        gain = torch.ones(self.k, device="cuda", dtype=torch.bfloat16)
        for weight in self.plain:
            if self.gate is not None:
                norm_gated_linear_triton(self.x[:tokens], gain, 1e-6, weight, "silu")
            elif tokens <= 128:
                norm_linear_triton(self.x[:tokens], gain, 1e-6, weight)
            else:
                dense(self.x[:tokens], weight)

    def line(self, seconds: float, tokens: int, copies: int, size: int = 1) -> str:
        """Microseconds of one product, and the fraction of the bandwidth or TFLOP/s."""
        each = seconds / copies
        if tokens <= 128:
            return f"{each * 1e6:7.1f} {size * self.bytes / each / BANDWIDTH:4.0%}"
        return f"{each * 1e6:7.0f} {2 * tokens * self.bytes / each / 1e12:5.0f}T"


def gemv_tiles(k: int, parts: int) -> list[GemvTile]:
    """Tiles worth trying for one token."""
    if k > 8192:
        tries = [
            (1, 132, 8),
            (1, 264, 8),
            (1, 528, 8),
            (2, 264, 8),
            (1, 132, 16),
            (1, 264, 16),
            (2, 132, 16),
            (1, 528, 4),
        ]
    else:
        tries = [(1, 528, 4), (2, 396, 4), (2, 528, 4), (2, 660, 4), (4, 264, 4), (4, 396, 4), (4, 528, 4), (4, 264, 8),
                 (2, 1056, 2), (2, 264, 8)]  # fmt: skip
    return list(dict.fromkeys(GemvTile(max(1, rows // parts), programs, warps) for rows, programs, warps in tries))


def dot_tiles(tokens: int, n: int, k: int, parts: int, kind: str) -> list[DotTile]:
    """Tiles worth trying for a few tokens."""
    width, found = min(128, max(16, 1 << (tokens - 1).bit_length())), {dot_tile(tokens, n, k, parts)}
    for rows in (64, 128):
        for splits in (1, 2, 4, 8):
            programs = -(-n // rows) * splits * -(-tokens // width)
            if (
                (splits > 1 and (parts > 1 or programs > 600))
                or programs < 60
                or rows * parts > 128
                or k < 512 * splits
            ):
                continue
            ahead = 1024 if tokens <= 16 else 0
            found.add(DotTile(width, rows, 128, splits, 8 if rows * width >= 16384 else 4, 4, ahead))
            if kind != "block" and width <= 64:
                found.add(DotTile(width, rows, 256, splits, 4, 3, ahead))
            if width <= 64:
                found.add(DotTile(width, rows, 128, splits, 4, 6, ahead))
    return sorted(found, key=str)


def wide_tiles(parts: int, kind: str) -> list[DotTile]:
    """Tiles worth trying for many tokens."""
    found = {wide_tile(parts), DotTile(128, 128 // parts, 128, 1, 8, 4), DotTile(128, 128 // parts, 128, 1, 4, 4)}
    if kind != "block":
        found |= {DotTile(128, 256 // parts, 128, 1, 8, 3), DotTile(256, 128 // parts, 128, 1, 8, 3)}
    return sorted(found, key=str)


def short(tile: GemvTile | DotTile | None) -> str:
    """The tile in few letters."""
    if tile is None:
        return "torch"
    if isinstance(tile, GemvTile):
        return f"r{tile.rows} p{tile.programs} w{tile.warps}"
    return f"{tile.tokens}x{tile.rows}x{tile.depth} k{tile.splits} w{tile.warps} s{tile.stages} a{tile.ahead}"


def table(
    kinds: tuple[str, ...], batches: tuple[int, ...], tiles_of: Callable[..., list[GemvTile | DotTile | None]]
) -> None:
    """For each weight and batch: bf16 as it is, the three best tiles, and where the chosen one stands."""
    for name, (n, k, parts) in SHAPES.items():
        for kind in kinds:
            held = Weights(name, kind)
            tried = {m: tiles_of(m, n, k, parts, kind) for m in batches}
            prepare([partial(held.ours, m, t) for m, all_of in tried.items() for t in all_of if t is not None])
            for tokens, all_of in tried.items():
                plain = timed(partial(held.bf16, tokens), 2, 3) if kind == kinds[0] else 0.0
                times = {t: attempt(partial(held.ours, tokens, t)) for t in all_of}
                order = sorted(times, key=lambda tile: times[tile])
                row = f"{name:8}{kind:6} M={tokens:<5}"
                if plain:
                    row += f" bf16 {held.line(plain, tokens, len(held.plain), 2)} |"
                row += f" first {short(all_of[0])} {held.line(times[all_of[0]], tokens, len(held.copies))} | best"
                shown = (f"{short(t)} {held.line(times[t], tokens, len(held.copies))};" for t in order[:4])
                print(row, *shown, flush=True)
            del held
            torch.cuda.empty_cache()


def gemv() -> None:
    """One token."""
    table(
        KINDS, (1,), lambda m, n, k, parts, kind: list(dict.fromkeys([gemv_tile(n, k, parts), *gemv_tiles(k, parts)]))
    )


def dot() -> None:
    """A few tokens."""
    table(("fp8",), (8, 32, 128), lambda m, n, k, parts, kind: [
        dot_tile(m, n, k, parts), *([None] if m > 16 else []),
        *(t for t in dot_tiles(m, n, k, parts, kind) if t != dot_tile(m, n, k, parts))])  # fmt: skip


def wide() -> None:
    """Many tokens."""
    table(
        KINDS,
        (512, 2048, 8192),
        lambda m, n, k, parts, kind: [*([None] if kind == "fp8" else []), *wide_tiles(parts, kind)],
    )


class Stack:
    """The products of one step of llama-8b with everything around them but attention, and its head in bf16."""

    def __init__(self, kind: str) -> None:
        def made(name: str) -> tuple[torch.Tensor, torch.Tensor]:
            n, k, parts = SHAPES[name]
            return random(n * parts, k) if kind == "bf16" else weight_of(n * parts, k, kind)  # type: ignore[return-value]

        self.kind, self.gain = kind, torch.rand(4096, device="cuda", dtype=torch.bfloat16)
        self.layers = [[made(name) for name in SHAPES] for _ in range(LAYERS)]
        self.hidden, self.attended = random(8192, 4096), random(8192, 4096)

    def run(self, tokens: int) -> None:
        """As a bound model calls them."""
        x, a, norm = self.hidden[:tokens], self.attended[:tokens], (self.gain, 1e-6)
        for qkv, o, up, down in self.layers:
            if self.kind == "bf16":
                norm_linear_triton(x, *norm, qkv)  # type: ignore[arg-type]
                linear_add_triton(a, o, x)  # type: ignore[arg-type]
                linear_add_triton(norm_gated_linear_triton(x, *norm, up, "silu"), down, x)  # type: ignore[arg-type]
                continue
            scaled_product(x, Given(*qkv, norm=norm))
            scaled_product(a, Given(*o, residual=x))
            h = scaled_product(x, Given(*up, norm=norm, gate="silu"))
            scaled_product(h, Given(*down, residual=x))


def stack() -> None:
    """ms of all products of a step."""
    batches = (1, 2, 8, 32, 64, 128, 512, 2048, 8192)
    for kind in ("bf16", *KINDS):
        held = Stack(kind)
        prepare([partial(held.run, m) for m in batches])
        times = [attempt(partial(held.run, m)) for m in batches]
        print(f"stack {kind:6}", *(f"{m}: {t * 1e3:.3f}" for m, t in zip(batches, times, strict=True)), flush=True)
        if kind == "fp8":
            for fast in (False, True):
                products.FAST_SUMS = fast
                print(f"  fast sums {fast}: 8192: {timed(partial(held.run, 8192)) * 1e3:.1f}", flush=True)
        del held
        torch.cuda.empty_cache()


def main(wanted: list[str]) -> None:
    """Run the parts that are wanted."""
    torch.manual_seed(0)
    overlap.switch(can_overlap())
    parts: dict[str, Callable[[], None]] = {"check": check, "stack": stack, "gemv": gemv, "dot": dot, "wide": wide}
    for name, part in parts.items():
        if not wanted or name in wanted:
            began = time.perf_counter()
            part()
            torch.cuda.empty_cache()
            print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
