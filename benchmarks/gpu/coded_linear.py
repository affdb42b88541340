"""Products with four-bit weights on a GPU: correct at real sizes and for every code, then tile by tile beside plain bf16.

PYTHONPATH=. python3 benchmarks/gpu/coded_linear.py [fault] [check] [tiles] [many] [stack] [--quick], all parts by default. Times
are medians of graph replays over more weights than the L2 cache holds; GB/s are of codes and scales (4.5 bits a weight).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch.nn.functional import linear as dense

from benchmarks.gpu.linear import MODELS, attempt, can_overlap, error, prepare, random, timed
from samovar.kernels import overlap
from samovar.kernels.coded_gated_linear.triton import coded_gated_linear_triton
from samovar.kernels.coded_linear import tiles
from samovar.kernels.coded_linear import triton as coded
from samovar.kernels.coded_linear.tiles import dot_tile
from samovar.kernels.coded_linear_add.triton import coded_linear_add_triton
from samovar.kernels.coded_weights import KINDS, decode, pack_codes, pack_small_scale, shape_of, small_scale
from samovar.kernels.coded_weights.triton import dequantize
from samovar.kernels.linear import triton as products
from samovar.kernels.linear.tiles import DotTile
from samovar.kernels.linear.tiles import choose_tile as plain_tile
from samovar.kernels.linear_add.triton import linear_add_triton
from samovar.kernels.logits.triton import logits_triton
from samovar.kernels.norm_gated_linear.triton import norm_gated_linear_triton
from samovar.kernels.norm_linear.triton import norm_linear_triton
from samovar.kernels.rms_norm.triton import rms_norm_triton
from samovar.kernels.silu_mul.triton import silu_mul_triton
from samovar.kernels.triton_launch import SHARED_BYTES

SHAPES = (("qkv", 6144, 4096, 1), ("o", 4096, 4096, 1), ("gate_up", 14336, 4096, 2), ("down", 4096, 14336, 1))
"""Name, rows of each part, inputs, parts: those of an 8B Llama."""
WIDTHS = {8: (1, 8), 16: (16,), 32: (32,), 64: (64,), 128: (128,)}
"""Tokens of a tile, and how many are computed with it."""
ROOM = SHARED_BYTES[90]
L2_BYTES = 250_000_000


def random_packed(rows: int, inputs: int, kind: str = "e2m1_16") -> coded.Packed:
    """A packed weight of random bits on the GPU, whose scales are from one half to two."""
    made, (row_bricks, input_bricks) = KINDS[kind], shape_of(rows, inputs, kind)
    codes = torch.randint(-(2**31), 2**31, (row_bricks, input_bricks, 128), device="cuda", dtype=torch.int32)
    if made.code == "e4m3":
        codes &= ~0x24002400  # nothing that is no number
    words = (row_bricks, input_bricks, 16 * made.words)
    if made.has_small_scale:
        scale = torch.randint(160, 176, (*words, 4), device="cuda", dtype=torch.uint8).view(torch.int32).view(words)
    else:
        numbers = (torch.rand(*words, 2, device="cuda") + 0.5) * 2.0 ** (made.shift - 1)
        if made.has_zero:
            zeros = -(128.0 + torch.randint(0, 16, numbers.shape, device="cuda"))
            second = numbers.view(row_bricks, input_bricks, made.words, 16, 2)
            if made.words == 2:
                second[:, :, 1] = zeros.view_as(second)[:, :, 1]
            else:
                numbers[..., 1] = zeros[..., 1]
        scale = numbers.to(torch.bfloat16).view(torch.int32).view(words)
    return codes, scale, torch.rand(rows, device="cuda") / inputs**0.5, kind


def check_codes() -> None:
    """Each of 16 codes with each of the positive E4M3 scales, through the kernel and cuBLAS: exactly."""
    codes = (torch.arange(64, device="cuda") % 16).expand(128, 64).to(torch.uint8).contiguous()
    scale = torch.arange(128, device="cuda", dtype=torch.uint8).clamp(1, 126).view(torch.float8_e4m3fn)[:, None]
    small = small_scale(scale.float().expand(128, 4).to(torch.float8_e4m3fn))
    weight = pack_codes(codes, "e2m1_16"), pack_small_scale(small), torch.ones(128, device="cuda"), "e2m1_16"
    expected = decode(*weight[:2], "e2m1_16", 128, 64, weight[2])
    x = torch.eye(64, device="cuda", dtype=torch.bfloat16)
    out = x.new_empty(64, 128)
    wrong: list[object] = []
    for tile in (DotTile(64, 64, 64), DotTile(16, 64, 64), DotTile(8, 64, 64), DotTile(128, 128, 64, warps=8)):
        if not torch.equal(coded.multiply(tile, x, weight, out).t().float(), expected):
            wrong.append(tile)
    if not torch.equal(dequantize(*weight, x.new_empty(128, 64)).float(), expected):
        wrong.append("dequantize")
    print("every code and scale exact:", not wrong, *wrong, flush=True)


def checked(quick: bool) -> Iterator[tuple[str, int, int, int]]:
    """(kind, rows, inputs, tokens) to be compared with float32."""
    sizes = ((6144, 4096), (200, 1440), (72, 96))
    for number, kind in enumerate(KINDS):
        for rows, inputs in sizes:
            for tokens in (0, 1, 3, 16, 17, 33, 64, 65, 128, 129, 300, 4096):
                if not (quick or number) or tokens in (1, 17, 65, 128, 300):
                    yield kind, rows, inputs, tokens


def check(quick: bool) -> None:
    """Every op and kind against float32; twice the same bits."""
    check_codes()
    weights = {}
    cases = list(checked(quick))
    for kind, rows, inputs, _ in cases:
        if (kind, rows, inputs) not in weights:
            weights[kind, rows, inputs] = random_packed(rows, inputs, kind)
    runs: list[Callable[[], object]] = []
    for kind, rows, inputs, tokens in cases:
        weight, x = weights[kind, rows, inputs], random(max(tokens, 1), inputs)[:tokens]
        bias = random(1, rows)[0]
        runs.append(partial(coded.coded_linear_triton, x, *weight, bias))
        if tokens in (1, 17, 65, 300):
            runs.append(partial(coded_linear_add_triton, x, *weight, random(tokens, rows), bias))
            runs.append(partial(coded.coded_linear_fixed, x, *weight, bias))
            if rows % 32 == 0:
                runs.append(partial(coded_gated_linear_triton, x, *weight, "silu", bias))
    prepare(runs)
    worst, count, same = 0.0, 0, True
    decoded = {key: decode(*weight[:2], key[0], key[1], key[2], weight[2]).t() for key, weight in weights.items()}
    for kind, rows, inputs, tokens in cases:
        weight, x = weights[kind, rows, inputs], random(max(tokens, 1), inputs)[:tokens]
        bias, base = random(1, rows)[0], random(max(tokens, 1), rows)[:tokens]
        expected = x.float() @ decoded[kind, rows, inputs] + bias.float()
        got = [(coded.coded_linear_triton(x, *weight, bias), expected)]
        if tokens in (1, 17, 65, 300):
            got.append((coded.coded_linear_fixed(x, *weight, bias), expected))
            added = base.clone()
            coded_linear_add_triton(x, *weight, added, bias)
            got.append((added, base.float() + expected))
            if rows % 32 == 0:
                gate, up = expected.chunk(2, -1)
                gated = coded_gated_linear_triton(x, *weight, "silu", bias)
                got.append((gated, torch.nn.functional.silu(gate) * up))
            same &= torch.equal(got[0][0], coded.coded_linear_triton(x, *weight, bias))
        for place, (result, wanted) in enumerate(got):
            off = error(result, wanted) if tokens else 0.0
            worst, count = max(worst, off), count + 1
            if not off < 1.2e-2:
                print(f"  WRONG {kind} [{rows}, {inputs}] tokens={tokens} result {place}: {off:.1e}")
    print(f"{count} products, worst relative error {worst:.1e}; twice the same bits: {same}", flush=True)


class Copies:
    """Copies of one packed weight that together exceed the L2 cache, and one input for all."""

    def __init__(self, n: int, k: int, parts: int) -> None:
        self.n, self.k, self.parts, self.bytes = n, k, parts, n * k * parts * tiles.BITS / 8
        self.copies = [random_packed(n * parts, k) for _ in range(max(2, -int(-L2_BYTES // self.bytes)))]
        self.x = random(4096, k)

    def ours(self, tokens: int, tile: DotTile | None) -> None:
        """One product, with the activation if there are two parts, per copy; without a tile as one chooses."""
        x = self.x[:tokens]
        for weight in self.copies:
            if tile is None:
                (
                    coded_gated_linear_triton(x, *weight, "silu")
                    if self.parts == 2
                    else coded.coded_linear_triton(x, *weight)
                )
            else:
                coded.multiply(tile, x, weight, x.new_empty(tokens, self.n), gate=self.gate)

    def apart(self, tokens: int, tile: DotTile) -> None:
        """The gated product as a product and an activation."""
        x = self.x[:tokens]
        for weight in self.copies:
            silu_mul_triton(coded.multiply(tile, x, weight, x.new_empty(tokens, 2 * self.n)))

    def through_cublas(self, tokens: int, size: int) -> None:
        """Decoded into `size` bytes at a time, and multiplied by cuBLAS."""
        x = self.x[:tokens]
        for weight in self.copies:
            y = coded.multiply_decoded(x, weight, None, most_bytes=size)
            if self.parts == 2:
                silu_mul_triton(y)

    @property
    def gate(self) -> str | None:
        """What joins the parts."""
        return "silu" if self.parts == 2 else None

    def line(self, seconds: float) -> str:
        """us of one product, and GB/s."""
        each = seconds / len(self.copies)
        return f"{each * 1e6:6.1f} us {self.bytes / each / 1e9:5.0f}"


class Plain:
    """The same with bfloat16 weights, by the kernels that serve those."""

    def __init__(self, n: int, k: int, parts: int) -> None:
        self.n, self.parts = n, parts
        self.copies = [random(n * parts, k) for _ in range(2 if parts == 2 else 4)]
        self.x = random(4096, k)

    def run(self, tokens: int) -> None:
        """One product, with the activation if there are two parts, per copy."""
        x = self.x[:tokens]
        tile = plain_tile(tokens, self.n, x.shape[1], self.parts, 2, ROOM)
        for weight in self.copies:
            if tile is not None:
                gate = "silu" if self.parts == 2 else None
                products.multiply(tile, x, weight, x.new_empty(tokens, self.n), gate=gate)
            else:
                y = dense(x, weight)
                if self.parts == 2:
                    silu_mul_triton(y)

    def us(self, tokens: int) -> float:
        """Microseconds of one product."""
        return timed(partial(self.run, tokens)) / len(self.copies) * 1e6


def candidates(width: int, n: int, k: int, parts: int, quick: bool) -> list[DotTile]:
    """Tiles worth trying for up to `width` tokens."""
    found = {tile} if (tile := dot_tile(width, n, k, parts)) is not None else set()
    if quick:
        return sorted(found, key=str)
    for rows in (64, 128):
        for depth in (64, 128, 256):
            for splits in (1, 2, 4, 8, 16):
                programs, steps = -(-n // rows) * splits, k // depth // splits
                if not 100 <= programs <= 1100 or steps < 4 or (rows * parts > 128 and width > 64):
                    continue
                if (width >= 64 and (depth > 128 or splits > 4)) or (depth == 64 and width < 32):
                    continue
                ahead = 8 if width <= 16 else 0
                for stages in (3, 4) if width > 16 else (3, 5):
                    for warps in (
                        (4, 8) if rows == 128 and width in (8, 128) else (4 if rows == 64 or width < 64 else 8,)
                    ):
                        tile = DotTile(width, rows, depth, splits, warps, stages, ahead)
                        if tiles.shared_bytes(tile, parts) <= ROOM - 2048:
                            found.add(tile)
    return sorted(found, key=str)


def short(tile: DotTile) -> str:
    """tokens x rows x depth, splits, warps, stages, bricks ahead."""
    return f"{tile.tokens}x{tile.rows}x{tile.depth} k{tile.splits} w{tile.warps} s{tile.stages} a{tile.ahead}"


def tile_tables(quick: bool) -> None:
    """For each shape and number of tokens the best tiles, what one chooses, and plain bf16."""
    held = {name: (Copies(n, k, p), Plain(n, k, p), n, k, p) for name, n, k, p in SHAPES}
    runs: list[Callable[[], None]] = []
    for copies, plain, n, k, p in held.values():
        for width in WIDTHS:
            runs += [partial(copies.ours, width, tile) for tile in candidates(width, n, k, p, quick)]
            if p == 2:
                runs += [partial(copies.apart, width, tile) for tile in candidates(width, 2 * n, k, 1, quick)]
        runs += [partial(plain.run, tokens) for width in WIDTHS.values() for tokens in width]
    prepare(runs)
    for name, (copies, plain, n, k, p) in held.items():
        for width, counts in WIDTHS.items():
            for tokens in counts[:1] if quick else counts:
                ways: dict[str, Callable[[], None]] = {
                    short(t): partial(copies.ours, tokens, t) for t in candidates(width, n, k, p, quick)
                }
                if p == 2:
                    ways |= {
                        "apart " + short(t): partial(copies.apart, tokens, t)
                        for t in candidates(width, 2 * n, k, 1, quick)
                    }
                times = {way: attempt(run) for way, run in ways.items()}
                order = sorted(times, key=lambda way: times[way])[:5]
                tile = dot_tile(tokens, n, k, p)
                if tile is not None and short(tile) not in times:
                    times[short(tile)] = attempt(partial(copies.ours, tokens, tile))
                chosen = "apart" if tile is None else f"{short(tile)} {copies.line(times[short(tile)])}"
                row = f"{name:8} M={tokens:3} bf16 {plain.us(tokens):6.1f} us | chosen {chosen}"
                print(row, "| best", *(f"{way} {copies.line(times[way])};" for way in order), flush=True)


def many(quick: bool) -> None:
    """More tokens: the kernel that decodes on the way, cuBLAS with decoded weights in workspaces of several sizes, bf16."""
    for name, n, k, parts in SHAPES:
        copies, plain = Copies(n, k, parts), Plain(n, k, parts)
        for tokens in (128, 256, 2048) if quick else (64, 128, 256, 512, 2048, 4096):
            row = f"{name:8} M={tokens:4} bf16 {plain.us(tokens):7.1f}"
            for size in (16, 32, 64, 256):
                seconds = attempt(partial(copies.through_cublas, tokens, size << 20)) / len(copies.copies)
                row += f" | {size} MiB {seconds * 1e6:7.1f}"
            if tokens <= 512:
                tile = dot_tile(128, n, k, parts)
                seconds = attempt(partial(copies.ours, tokens, tile)) / len(copies.copies)
                row += f" | kernel {seconds * 1e6:7.1f}"
            print(row, flush=True)


class Stack:
    """The products of a decode step with everything around them but attention, in four bits and plain."""

    def __init__(self) -> None:
        h, qkv, o, f, v, layers = MODELS["llama-8b"]
        self.sizes = (h, qkv, o, f, v)
        self.layers = [
            (random_packed(qkv, h), random_packed(h, o), random_packed(2 * f, h), random_packed(h, f))
            for _ in range(layers)
        ]
        plain = (random(qkv, h), random(h, o), random(2 * f, h), random(h, f))
        self.plain = [tuple(w.clone() for w in plain) for _ in range(layers)]
        self.head, self.gain = random(v, h), torch.rand(h, device="cuda", dtype=torch.bfloat16)
        self.hidden, self.attended = random(4096, h), random(4096, o)

    def coded(self, tokens: int) -> None:
        """As a bound model calls the ops."""
        x, a = self.hidden[:tokens], self.attended[:tokens]
        for qkv, o, up, down in self.layers:
            coded.coded_linear_triton(rms_norm_triton(x, self.gain, 1e-6), *qkv)
            coded_linear_add_triton(a, *o, x)
            gated = coded_gated_linear_triton(rms_norm_triton(x, self.gain, 1e-6), *up, "silu")
            coded_linear_add_triton(gated, *down, x)
        logits_triton(rms_norm_triton(x, self.gain, 1e-6)[:128], self.head)

    def bf16(self, tokens: int) -> None:
        """The same with plain weights."""
        x, a = self.hidden[:tokens], self.attended[:tokens]
        for qkv, o, up, down in self.plain:
            norm_linear_triton(x, self.gain, 1e-6, qkv)
            linear_add_triton(a, o, x)
            linear_add_triton(norm_gated_linear_triton(x, self.gain, 1e-6, up, "silu"), down, x)
        logits_triton(rms_norm_triton(x, self.gain, 1e-6)[:128], self.head)


def stack(quick: bool) -> None:
    """ms of all products and norms of a step, of four bits and of bf16."""
    held = Stack()
    counts = (1, 8, 32, 128, 2048) if quick else (1, 4, 8, 16, 32, 64, 128, 256, 2048, 4096)
    prepare([partial(way, m) for way in (held.coded, held.bf16) for m in counts])
    print("tokens      coded ms      bf16 ms (products, norms, head of a step)")
    for tokens in counts:
        times = [attempt(partial(way, tokens)) * 1e3 for way in (held.coded, held.bf16)]
        print(f"{tokens:6} {times[0]:12.3f} {times[1]:12.3f}", flush=True)


@contextmanager
def settled(wanted: bool) -> Iterator[None]:
    """Inside, the decoder waits for the product that reads its registers, or does not."""
    before, coded.SETTLES = coded.SETTLES, wanted
    try:
        yield
    finally:
        coded.SETTLES = before


def fault_tiles() -> list[DotTile]:
    """Tiles that differ in what might matter for products that are still under way."""
    found = [
        DotTile(width, 64, depth, splits, 4, stages)
        for width in (32, 64, 128)
        for depth in (64, 128)
        for splits, stages in ((1, 2), (1, 3), (2, 3))
    ]
    return [*found, DotTile(128, 128, 64, 1, 8, 3), DotTile(128, 128, 128, 2, 8, 3), DotTile(16, 64, 128, 8, 4, 4)]


def fault(quick: bool) -> None:
    """The worst of five results of each tile, without and with the wait for products that read registers."""
    rows, inputs = 6144, 4096
    kinds = ("int4_32", "e2m1_16") if quick else ("int4_32", "int4_64", "int4_32_zero", "e2m1_16", "e2m1_32")
    weights = {kind: random_packed(rows, inputs, kind) for kind in kinds}
    x = random(128, inputs)

    def run(kind: str, tile: DotTile, wanted: bool) -> torch.Tensor:
        with settled(wanted):
            given = x[: tile.tokens]
            return coded.multiply(tile, given, weights[kind], x.new_empty(len(given), rows))

    cases = [(kind, tile) for kind in kinds for tile in fault_tiles()]
    prepare([partial(run, kind, tile, wanted) for kind, tile in cases for wanted in (False, True)])
    wrong = {False: 0, True: 0}
    for kind, tile in cases:
        expected = x[: tile.tokens].float() @ decode(*weights[kind][:2], kind, rows, inputs, weights[kind][2]).t()
        line = f"{kind:13} {short(tile):28}"
        for wanted in (False, True):
            off = max(error(run(kind, tile, wanted), expected) for _ in range(5))
            wrong[wanted] += not off < 1.2e-2
            line += f" {'waits' if wanted else 'does not wait'}: {off:.1e}{' WRONG' if not off < 1.2e-2 else ''}"
            if kind == kinds[-1]:
                line += f" ({timed(partial(run, kind, tile, wanted), 4, 3) * 1e6:.1f} us from the L2 cache)"
        print(line, flush=True)
    print(f"wrong of {len(cases)}: {wrong[False]} without the wait, {wrong[True]} with it", flush=True)


def main(words: list[str]) -> None:
    """Run the parts that are wanted."""
    torch.manual_seed(0)
    overlap.switch(can_overlap())
    quick, wanted = "--quick" in words, [word for word in words if not word.startswith("-")]
    parts = {"fault": fault, "check": check, "stack": stack, "tiles": tile_tables, "many": many}
    for name, part in parts.items():
        if not wanted or name in wanted:
            began = time.perf_counter()
            part(quick)
            torch.cuda.empty_cache()
            print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
