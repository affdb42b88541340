"""Mixtures of experts on a GPU: correct at real sizes, then plans for 1 to 8192 tokens, and the parts of a layer.

PYTHONPATH=. python3 benchmarks/gpu/moe.py [check] [parts] [few] [many], all by default. The shape is Qwen3-30B-A3B's;
times are medians of graph replays over different tokens, so that weights come from memory. Bytes are those of the
experts that have tokens.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.gpu.linear import attempt, prepare
from samovar.kernels import overlap
from samovar.kernels.expert_products import expert_products
from samovar.kernels.expert_products import triton as experts
from samovar.kernels.expert_products.tiles import BLOCKS, BlockTile, PairTile, Plan, fitting, plan
from samovar.kernels.expert_products.triton import expert_products_fixed, expert_products_triton, multiply
from samovar.kernels.logits.triton import logits_triton
from samovar.kernels.route import route
from samovar.kernels.route.triton import route_triton
from samovar.kernels.silu_mul.triton import silu_mul_triton

HIDDEN, INNER, EXPERTS, TOP_K = 2048, 768, 128, 8
EXPERT_BYTES = 3 * HIDDEN * INNER * 2
BANDWIDTH = 4.3e12
FEW = (1, 2, 4, 8, 16, 32, 64, 128)
MANY = (512, 2048, 8192)
BATCHES = {1: 16, 2: 12, 4: 8}
"""Inputs that one graph goes through, by number of tokens; 4 for more, 1 for many."""
Run = Callable[[], Any]


def random(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """bfloat16."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


class Layer:
    """The weights of one layer."""

    def __init__(self) -> None:
        self.gate_up = random(EXPERTS, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5)
        self.down = random(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5)
        self.gate = random(EXPERTS, HIDDEN, scale=HIDDEN**-0.5)

    def routed(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(weights, ids) of tokens."""
        return route_triton(logits_triton(x, self.gate), None, TOP_K, "softmax", True)

    def batches(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Inputs (x, ids, weights), all different."""
        count = BATCHES.get(tokens, 4 if tokens <= 128 else 1)
        found = []
        for _ in range(count):
            x = random(tokens, HIDDEN)
            weights, ids = route(torch.randn(tokens, EXPERTS, device="cuda"), None, TOP_K, "softmax", True)
            found.append((x, ids, weights))
        return found


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error in the Euclidean norm."""
    return float((got.float() - expected.float()).norm() / expected.float().norm())


def check(layer: Layer) -> None:
    """Against the reference in float32 at real sizes; the same bits at every run; fixed rows alike at every batch size."""
    whole, worst, fixed, same = random(700, HIDDEN), 0.0, {}, True
    wide = layer.gate_up.float(), layer.down.float()
    sizes = (1, 2, 3, 8, 17, 32, 33, 64, 128, 200, 700)
    inputs = {
        tokens: (whole[:tokens], *layer.batches(tokens)[0][1:], layer.gate_up, layer.down, "silu") for tokens in sizes
    }
    prepare([partial(op, *each) for each in inputs.values() for op in (expert_products_triton, expert_products_fixed)])
    for tokens in sizes:
        x = whole[:tokens]
        weights, ids = layer.routed(x)
        again = route(logits_triton(x, layer.gate), None, TOP_K, "softmax", True)
        if not torch.equal(again[1], ids) or error(weights, again[0]) > 1e-5:
            print(f"  WRONG route tokens={tokens}")
        expected = expert_products(x.float(), ids, weights, *wide, "silu")
        got = expert_products_triton(x, ids, weights, layer.gate_up, layer.down, "silu")
        fixed[tokens] = expert_products_fixed(x, ids, weights, layer.gate_up, layer.down, "silu")
        same &= torch.equal(got, expert_products_triton(x, ids, weights, layer.gate_up, layer.down, "silu"))
        errors = error(got, expected), error(fixed[tokens], expected)
        worst = max(worst, *errors)
        if not max(errors) < 1.5e-2:
            print(f"  WRONG tokens={tokens} chosen {errors[0]:.1e} fixed {errors[1]:.1e}")
    alike = all(torch.equal(rows, fixed[700][:tokens]) for tokens, rows in fixed.items())
    print(f"worst relative error {worst:.1e}; same bits again: {same}; fixed alike at every batch size: {alike}")


def parts(layer: Layer) -> None:
    """us of each kernel of a layer as chosen, and of the whole; CUDA graphs, different tokens in every call."""
    prepare([partial(whole_layer, layer, layer.batches(tokens)) for tokens in (*FEW, *MANY)])
    print(f"{'tokens':>7}{'router':>8}{'route':>8}{'sort':>8}{'experts':>9}{'layer':>8}{'GB/s':>7}{'TF/s':>7}  plan")
    for tokens in (*FEW, *MANY):
        batches = layer.batches(tokens)
        how, count = chosen(tokens), len(batches)
        scores = [torch.randn(tokens, EXPERTS, device="cuda") for _ in batches]
        runs: dict[str, Run] = {
            "router": lambda batches=batches: [logits_triton(x, layer.gate) for x, _, _ in batches],
            "route": lambda scores=scores: [route_triton(s, None, TOP_K, "softmax", True) for s in scores],
            "sort": lambda batches=batches, how=how: [sort(layer, how, x, ids) for x, ids, _ in batches],
            "experts": partial(products, layer, batches, how),
            "layer": partial(whole_layer, layer, batches),
        }
        times = {name: attempt(run) / count for name, run in runs.items() if name != "sort" or how.is_sorted}
        line = "".join(f"{times.get(name, 0) * 1e6:{9 if name == 'experts' else 8}.1f}" for name in runs)
        print(f"{tokens:7}{line}{speed(times['experts'], batches)}  {shortly(how)}", flush=True)


def chosen(tokens: int) -> Plan:
    """The plan that the op makes."""
    return plan(tokens, TOP_K, EXPERTS, INNER, HIDDEN, element_size=2, shared=experts._shared)


def sort(layer: Layer, how: Plan, x: torch.Tensor, ids: torch.Tensor) -> None:
    """The kernel that puts pairs into blocks."""
    assert isinstance(how.gate_up, BlockTile)
    experts._Call(x, ids, ids, layer.gate_up, layer.down, 0, None).sort(how.gate_up.tokens)


def products(layer: Layer, batches: list[tuple[torch.Tensor, ...]], how: Plan) -> None:
    """The op with one plan."""
    for x, ids, weights in batches:
        multiply(how, x, ids, weights, layer.gate_up, layer.down, "silu")


def whole_layer(layer: Layer, batches: list[tuple[torch.Tensor, ...]]) -> None:
    """Router and experts, as a bound model calls them."""
    for x, _, _ in batches:
        weights, ids = layer.routed(x)
        expert_products_triton(x, ids, weights, layer.gate_up, layer.down, "silu")


def speed(seconds: float, batches: list[tuple[torch.Tensor, ...]]) -> str:
    """GB/s of the weights that are needed, and TFLOP/s."""
    needed = statistics.mean(len(ids.unique()) for _, ids, _ in batches) * EXPERT_BYTES
    flops = 6 * HIDDEN * INNER * TOP_K * len(batches[0][0])
    return f"{needed / seconds / 1e9:7.0f}{flops / seconds / 1e12:7.1f}"


def shortly(how: Plan) -> str:
    """Both tiles."""
    names = []
    for tile in (how.gate_up, how.down):
        if isinstance(tile, PairTile):
            names.append(f"{tile.rows}x{tile.columns} w{tile.warps}")
        else:
            names.append(f"{tile.tokens}x{tile.rows}x{tile.depth} w{tile.warps} s{tile.stages}")
    return " | ".join(names) + (" sorted" if how.is_sorted else "")


def pair_plans() -> list[Plan]:
    """Vector plans worth trying."""
    ups = [(1, 2048, 4), (2, 1024, 4), (2, 2048, 8), (4, 512, 4), (2, 2048, 4), (4, 1024, 8), (1, 2048, 2), (8, 256, 4)]
    downs = [(16, 256, 4), (8, 256, 4), (4, 256, 4), (8, 256, 2), (4, 1024, 4), (2, 1024, 4), (32, 256, 8), (4, 256, 2)]
    base = chosen(1)
    plans = [replace(base, gate_up=PairTile(*each)) for each in ups]
    return [base, *plans, *(replace(base, down=PairTile(*each)) for each in downs)]


def block_plans(tokens: int) -> list[Plan]:
    """Tiled plans worth trying."""
    found = []
    each = tokens * TOP_K // EXPERTS
    widths = [w for w in (16, 32, 64, 128) if w in (16, 32) or each // 4 <= w <= max(16, 4 * each)]
    for is_sorted in (False, True):
        for width in widths:
            if not is_sorted and (width < tokens or width > 2 * tokens + 8):
                continue
            for rows, depth, warps, stages in TRIED[width]:
                up, down = BLOCKS[width]
                up_tile, down_tile = (
                    BlockTile(width, rows, depth, warps, stages),
                    BlockTile(width, rows, depth, warps, stages),
                )
                if up_tile == fitting(up_tile, 2, 2, 227 << 10):
                    found.append(Plan(up_tile, down, is_sorted))
                if down_tile == fitting(down_tile, 1, 2, 227 << 10):
                    found.append(Plan(up, down_tile, is_sorted))
    return list(dict.fromkeys([chosen(tokens), *found]))


TRIED = {
    16: [
        (32, 128, 4, 4),
        (64, 64, 4, 4),
        (64, 128, 4, 4),
        (64, 256, 4, 2),
        (128, 64, 4, 4),
        (128, 128, 4, 4),
        (128, 128, 8, 3),
    ],
    32: [(64, 64, 4, 4), (64, 128, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4)],
    64: [(64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 8, 4), (128, 64, 4, 3), (256, 64, 8, 3)],
    128: [(64, 64, 4, 3), (64, 64, 8, 4), (128, 64, 8, 4), (128, 64, 8, 3), (256, 64, 8, 3), (128, 64, 4, 4)],
}
"""Results, inputs, warps and stages of tiles, by tokens of a tile."""


def table(layer: Layer, tokens: int, plans: list[Plan]) -> None:
    """The chosen plan and the best ones."""
    batches = layer.batches(tokens)
    times = {how: attempt(partial(products, layer, batches, how)) / len(batches) for how in plans}
    order = sorted(times, key=lambda how: times[how])
    first = plans[0]
    print(f"M={tokens:5} chosen {shortly(first)} {times[first] * 1e6:7.1f} us{speed(times[first], batches)}")
    for how in order[:6]:
        print(f"{'':14} {shortly(how):52} {times[how] * 1e6:7.1f} us{speed(times[how], batches)}", flush=True)


def few(layer: Layer) -> None:
    """Decode: plans by number of tokens."""
    plans = {m: [*(pair_plans() if m <= 4 else []), *(block_plans(m) if m > 2 else [])] for m in FEW}
    inputs = {m: layer.batches(m)[:1] for m in FEW}
    prepare([partial(products, layer, inputs[m], how) for m in FEW for how in plans[m]])
    for tokens in FEW:
        table(layer, tokens, plans[tokens])


def many(layer: Layer) -> None:
    """Prefill: plans, and torch's grouped product on gathered rows."""
    plans = {m: block_plans(m) for m in MANY}
    prepare([partial(products, layer, layer.batches(m), how) for m in MANY for how in plans[m]])
    for tokens in MANY:
        table(layer, tokens, plans[tokens])
        batches = layer.batches(tokens)
        seconds = attempt(partial(grouped, layer, *batches[0]))
        print(f"{'':14} {'gather, torch._grouped_mm':52} {seconds * 1e6:7.1f} us{speed(seconds, batches)}", flush=True)


def grouped(layer: Layer, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Rows gathered by expert, two grouped products of torch's, rows scattered back."""
    flat = ids.flatten().long()
    order = flat.argsort(stable=True)
    ends = torch.zeros(EXPERTS, dtype=torch.int32, device="cuda").scatter_add_(0, flat, torch.ones_like(ids).flatten())
    ends = ends.cumsum(0).int()
    h = torch._grouped_mm(x[order // TOP_K], layer.gate_up.transpose(1, 2), offs=ends)
    y = torch._grouped_mm(silu_mul_triton(h), layer.down.transpose(1, 2), offs=ends)
    back = torch.empty_like(y).index_copy_(0, order, y)
    return torch.bmm(weights[:, None].to(y.dtype), back.view(len(x), TOP_K, -1))[:, 0]


def main(wanted: list[str]) -> None:
    """Run the parts that are wanted."""
    torch.manual_seed(0)
    major, minor = torch.cuda.get_device_capability()
    overlap.adapt(f"sm_{major}{minor}")
    experts.adapt(f"sm_{major}{minor}")
    layer = Layer()
    every: dict[str, Callable[[Layer], None]] = {"check": check, "parts": parts, "few": few, "many": many}
    for name, part in every.items():
        if not wanted or name in wanted:
            began = time.perf_counter()
            part(layer)
            torch.cuda.empty_cache()
            print(f"-- {name}: {time.perf_counter() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
