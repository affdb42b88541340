"""Attention over latent rows on a GPU: correct at real size, then decode, tiles and prefill.

PYTHONPATH=. python3 benchmarks/gpu/latent.py [check] [decode] [tiles] [prefill], all by default. Rows are DeepSeek V3's,
512 + 64 numbers; 128 heads are those of one GPU without tensor parallelism, 16 those of one of eight. Times are medians of
graph replays whose launches read different sequences, more than the L2 cache holds. GB/s counts the rows that are read
once; "products" are the two around the kernels, which every other kernel would need, too.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from benchmarks.gpu.linear import attempt, prepare
from samovar.attention import latent_on_gpu
from samovar.attention.base import AttentionCall, Spans, SpanTensors
from samovar.attention.latent_on_gpu import (
    MADE,
    LatentTiles,
    Part,
    absorb,
    absorbed_tiles,
    attend_latent,
    make,
    parts_of,
    splits_of,
)
from samovar.attention.reference import ReferenceAttention
from samovar.attention.triton import TritonAttention, TritonPlan
from samovar.core.cache_spec import LatentDims
from samovar.hardware.latent_memory import made_at_once
from samovar.kernels.op import compare
from samovar.kernels.triton_launch import cdiv
from samovar.kernels.write_latent import write_latent
from samovar.kernels.write_latent.triton import write_latent_triton

DIMS, LITE = LatentDims(512, 64, 128, 128), LatentDims(512, 64, 192, 256)
PAGE, DEVICE, DTYPE, L2_BYTES, PROCESSORS = 16, "cuda", torch.bfloat16, 120 << 20, 132
Sizes = Sequence[tuple[int, int]]
Run = Callable[[], object]


@dataclass(frozen=True)
class Steps:
    """Steps of equal lengths over different blocks of one cache."""

    q: torch.Tensor
    cache: tuple[torch.Tensor, torch.Tensor]
    plans: list[TritonPlan]
    call: AttentionCall
    row_bytes: int

    def out(self) -> torch.Tensor:
        assert self.call.latent is not None
        return torch.full((*self.q.shape[:2], self.call.latent.value), torch.nan, dtype=DTYPE, device=DEVICE)


def make_steps(sizes: Sizes, heads: int, *, dims: LatentDims = DIMS, most: int = 32) -> Steps:
    """Random numbers; as many steps as fill the L2 cache, at most `most`; blocks in random order."""
    blocks = [cdiv(total, PAGE) for _, total in sizes]
    count = max(1, min(most, cdiv(L2_BYTES, max(1, sum(blocks)) * PAGE * dims.row * 2)))
    rows = torch.randn((sum(blocks) * count, PAGE, 1, dims.row), dtype=DTYPE, device=DEVICE)
    expansion = torch.randn((heads, dims.nope + dims.value, dims.rank), dtype=DTYPE, device=DEVICE) * dims.rank**-0.5
    order = torch.randperm(sum(blocks) * count, dtype=torch.int32)
    firsts = list(itertools.accumulate((new for new, _ in sizes), initial=0))
    plans, used = [], 0
    for _ in range(count):
        tables = torch.zeros((len(sizes), max(blocks) + 1), dtype=torch.int32)
        for row, length in enumerate(blocks):
            tables[row, :length] = order[used : used + length]
            used += length
        ints, tables = (firsts, [total for _, total in sizes], list(range(len(sizes)))), tables.to(DEVICE)
        tensors = SpanTensors(*(torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ints), tables)
        plans.append(TritonAttention().plan(Spans([new for new, _ in sizes], ints[1], tables, tensors)))
    q = torch.randn((firsts[-1], heads, dims.query), dtype=DTYPE, device=DEVICE)
    call = AttentionCall(dims.query**-0.5, latent=dims)
    return Steps(q, (rows, expansion), plans, call, sum(total for _, total in sizes) * dims.row * 2)


def check() -> None:
    """Every way, against the reference in float32; and a run twice."""
    print("check: root mean square error, relative to that of the result")
    mixed = [(1, 700), (1, 33), (512, 512), (5, 900), (1000, 3000), (100, 8000), (2048, 2048), (1, 4)]
    cases: list[tuple[str, Sizes, int, LatentDims]] = [
        ("decode", [(1, n) for n in (576, 1, 64, 4000, 577, 0, 130, 9000)], heads, DIMS) for heads in (128, 16, 32)
    ]
    cases += [("mixed", mixed, 16, DIMS), ("mixed", mixed, 128, DIMS), ("mixed 192/256", mixed, 20, LITE)]
    cases += [("passes", [(700, 9000)], 128, DIMS), ("many", [(1, 100 + 7 * i) for i in range(300)], 16, DIMS)]
    steps = [make_steps(sizes, heads, dims=dims, most=1) for _, sizes, heads, dims in cases]
    prepare([partial(attend_latent, one.q, one.cache, one.plans[0], one.call) for one in steps])
    for (name, _, heads, _), one in zip(cases, steps, strict=True):
        got = attend_latent(one.q, one.cache, one.plans[0], one.call)
        again = attend_latent(one.q, one.cache, one.plans[0], one.call)
        expected = reference(one)
        error = float((got.float() - expected).square().mean().sqrt() / expected.square().mean().sqrt())
        largest = float((got.float() - expected).abs().max())
        verdict = "ok" if error < 8e-3 and torch.equal(got, again) else "WRONG"
        print(f"  {name}, {heads} heads: {error:.1e}, largest {largest:.1e} {verdict}", flush=True)
    assert write_latent.make_examples is not None
    for dtype in (torch.float32, DTYPE):
        found = {compare(write_latent, write_latent_triton, e, dtype, DEVICE) for e in write_latent.make_examples()}
        print(f"  write_latent {dtype}: {found - {None} or 'ok'}", flush=True)


def reference(steps: Steps) -> torch.Tensor:
    """In float32, sequence by sequence; zeros for sequences without keys."""
    spans, out = steps.plans[0].spans, steps.out().float().zero_()
    firsts = list(itertools.accumulate(spans.new_tokens, initial=0))
    for i, total in enumerate(spans.total_tokens):
        if total:
            one = Spans([spans.new_tokens[i]], [total], spans.block_tables[i : i + 1])
            rows = slice(firsts[i], firsts[i + 1])
            out[rows] = ReferenceAttention().run(steps.q[rows].float(), steps.cache, one, steps.call)
    return out


def decode_work(steps: Steps, tiles: LatentTiles | None = None, splits: int | None = None) -> Run:
    """One layer's decode attention for each of `steps`, between the projections."""
    out, count = steps.out(), len(steps.q)
    works = [
        partial(absorb, out, steps.q, steps.cache, plan, steps.call, Part(0, count, 0, count), tiles, splits)
        for plan in steps.plans
    ]
    return partial(run_all, works)


def product_work(steps: Steps) -> Run:
    """The two products around the kernels alone."""
    q, expansion, out = steps.q, steps.cache[1], steps.out()
    latent = q.new_empty((q.shape[1], len(q), DIMS.rank))

    def work() -> None:
        for _ in steps.plans:
            torch.bmm(q[..., : DIMS.nope].transpose(0, 1), expansion[:, : DIMS.nope], out=latent)
            torch.bmm(latent, expansion[:, DIMS.nope :].transpose(1, 2), out=out.transpose(0, 1))

    return work


def run_all(works: Sequence[Run]) -> None:
    """One after the other."""
    for work in works:
        work()


def decode() -> None:
    """Contexts by batch sizes by heads, as the backend does it."""
    print("\ndecode: microseconds a layer, of these products; splits; TB/s of rows, TFLOP/s, without the products")
    prepare([decode_work(make_steps([(1, 64)], heads, most=1), splits=s) for heads in (128, 16) for s in (1, 2)])
    for heads, batch in itertools.product((128, 16), (1, 8, 32, 128)):
        cells = []
        for context in (1024, 4096, 8192, 32768):
            if batch * context > 2 << 20:
                continue
            steps = make_steps([(1, context)] * batch, heads)
            count = len(steps.plans)
            whole, products = attempt(decode_work(steps)) / count, attempt(product_work(steps)) / count
            tiles = absorbed_tiles(heads, is_small=False, is_exact=False)
            splits = splits_of([context] * batch, cdiv(heads, tiles.rows), PROCESSORS)
            kernels, flops = whole - products, 2 * batch * context * heads * (DIMS.row + DIMS.rank)
            rates = f"{steps.row_bytes / kernels / 1e12:.2f} TB/s {flops / kernels / 1e12:.0f} TF"
            cells.append(f"{context}: {whole * 1e6:.1f} ({products * 1e6:.1f}) x{splits} {rates}")
        print(f"  {heads} heads, batch {batch}: " + " | ".join(cells), flush=True)


FEW = [
    LatentTiles(16, *rest)
    for rest in ((32, 4, 2), (32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 8, 2), (128, 8, 1))
]
MANY = [
    *(LatentTiles(64, *rest) for rest in ((32, 8, 2), (32, 8, 3), (64, 8, 1), (64, 8, 2), (32, 4, 2), (64, 4, 2))),
    *(LatentTiles(*one) for one in ((128, 32, 8, 2), (128, 64, 8, 1), (32, 32, 4, 2), (32, 64, 4, 2), (16, 64, 4, 2))),
]
PREFILL = [
    *(LatentTiles(128, *rest) for rest in ((32, 8, 2), (64, 8, 2), (64, 8, 3), (128, 8, 1), (128, 8, 2), (64, 4, 2))),
    *(LatentTiles(64, *rest) for rest in ((64, 4, 2), (64, 4, 3), (128, 4, 2))),
]


def tiles() -> None:
    """Tiles by splits, the best six of each shape. A star marks what the backend takes."""
    print("\ntiles of decode: microseconds of rows/keys/warps/stages x splits")
    choices = {16: FEW, 128: MANY}
    shapes = [(16, 1, 8192), (16, 32, 8192), (16, 128, 2048), (128, 1, 8192), (128, 16, 8192), (128, 128, 2048)]
    for heads, found in choices.items():
        step = make_steps([(1, 64)], heads, most=1)
        prepare([decode_work(step, one, splits) for one in found for splits in (1, 2)])
    for heads, batch, context in shapes:
        steps, rows = make_steps([(1, context)] * batch, heads, most=8), []
        own = absorbed_tiles(heads, is_small=False, is_exact=False)
        for one in choices[heads]:
            best = splits_of([context] * batch, cdiv(heads, one.rows), PROCESSORS)
            for splits in sorted({max(1, best // 2), best, 2 * best}):
                time = attempt(decode_work(steps, one, splits)) / len(steps.plans) * 1e6
                star = "*" if (one, splits) == (own, best) else ""
                rows.append((time, f"{one.rows}/{one.keys}/{one.warps}/{one.stages} x{splits}{star} {time:.1f}"))
        shown = [text for i, (_, text) in enumerate(sorted(rows)) if i < 6 or "*" in text]
        print(f"  {heads} heads, batch {batch}, {context} keys: " + " | ".join(shown), flush=True)


def prefill_work(steps: Steps, tiles: LatentTiles | None) -> Run:
    """Chunks whose keys and values are made."""
    out, plan = steps.out(), steps.plans[0]
    dims, heads = steps.call.latent, steps.q.shape[1]
    assert dims is not None
    parts = [part for part in parts_of(plan, dims, heads, 2) if part.keys is not None]
    return partial(run_all, [partial(make, out, steps.q, steps.cache, plan, steps.call, part, tiles) for part in parts])


def prefill() -> None:
    """A prompt, and a chunk with history: whole, and TFLOP/s of attention alone (making keys and values counts as time)."""
    print("\nprefill: milliseconds a layer, TFLOP/s of causal attention, by rows/keys/warps/stages; then absorbed")
    shapes: list[tuple[int, Sizes]] = [
        (heads, sizes) for heads in (16, 128) for sizes in ([(8192, 8192)], [(2048, 2048)] * 4, [(2048, 32768)])
    ]
    works = {}
    for heads, sizes in shapes:
        steps = make_steps(sizes, heads, most=1)
        works[heads, tuple(sizes)] = [prefill_work(steps, one) for one in PREFILL]
    prepare([work for found in works.values() for work in found])
    for (heads, sizes), found in works.items():
        pairs = sum(new * (total - new) + new * (new + 1) // 2 for new, total in sizes)
        flops = 2 * pairs * heads * (DIMS.query + DIMS.value)
        rows = []
        for one, work in zip(PREFILL, found, strict=True):
            time, star = attempt(work), "*" if one == MADE["large"] else ""
            rows.append(
                (
                    time,
                    f"{one.rows}/{one.keys}/{one.warps}/{one.stages}{star} {time * 1e3:.2f} {flops / time / 1e12:.0f}",
                )
            )
        passes = cdiv(max(total for _, total in sizes), made_at_once(DIMS, heads, 2))
        shown = [text for i, (_, text) in enumerate(sorted(rows)) if i < 4 or "*" in text]
        print(f"  {heads} heads, {list(sizes)}, {passes} passes: " + " | ".join(shown), flush=True)
    for heads, new in itertools.product((16, 128), (16, 64, 128, 256, 512)):
        steps = make_steps([(new, 16384)], heads, most=1)
        absorbed = partial(absorb, steps.out(), steps.q, steps.cache, steps.plans[0], steps.call, Part(0, 1, 0, new))
        made = partial(make, steps.out(), steps.q, steps.cache, steps.plans[0], steps.call, _made(heads, new))
        chosen = "made" if latent_on_gpu.expands(new, 16384, DIMS) else "absorbed"
        cells = f"absorbed {attempt(absorbed) * 1e3:.2f} ms, made {attempt(made) * 1e3:.2f} ms, chosen: {chosen}"
        print(f"  {heads} heads, {new} after {16384 - new}: {cells}", flush=True)


def _made(heads: int, new: int) -> Part:
    return Part(0, 1, 0, new, made_at_once(DIMS, heads, 2))


def main() -> None:
    """What was asked for."""
    torch.manual_seed(0)
    torch.set_grad_enabled(False)
    assert torch.cuda.get_device_properties(0).multi_processor_count >= PROCESSORS
    for name in sys.argv[1:] or ("check", "decode", "tiles", "prefill"):
        {"check": check, "decode": decode, "tiles": tiles, "prefill": prefill}[name]()


if __name__ == "__main__":
    main()
