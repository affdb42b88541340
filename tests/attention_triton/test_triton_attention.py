"""The Triton attention kernels against the reference: in the interpreter where there is no GPU, small sizes.

Everything that a program must not read is NaN, and table entries past a sequence's end name no block at all.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from samovar.attention import cudnn
from samovar.attention.base import AttentionCall, AttentionSpec, Spans, SpanTensors
from samovar.attention.cudnn import CudnnAttention
from samovar.attention.reference import ReferenceAttention
from samovar.attention.triton import MAX_PARTS, MIN_PART, SPLITS, TritonAttention
from samovar.cache.kv_cache import KVCache
from samovar.core.cache_spec import CacheSpec
from samovar.kernels import overlap
from samovar.kernels.triton_launch import LaunchNotes, noting

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PLAIN = AttentionCall(0.2)
Step = tuple[Spans, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


def make_step(
    sizes: list[tuple[int, int]],
    *,
    heads: tuple[int, int] = (4, 2),
    dim: int = 32,
    block_size: int = 16,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
    window: int | None = None,
    is_head_major: bool = True,
    seed: int = 0,
) -> Step:
    """Sequences of (new, total) tokens; q rows count on, so that a sequence's are the same in any batch of one seed."""
    rng = random.Random(seed)
    lengths = [-(-total // block_size) for _, total in sizes]
    spec = CacheSpec("full", heads[1], dim, dtypes[1].itemsize)
    cache = KVCache([spec], sum(lengths) + 2, block_size, dtypes[1], DEVICE, is_head_major=is_head_major)
    keys, values = cache.layers[0]
    keys.fill_(torch.nan)
    values.fill_(torch.nan)
    blocks = list(range(sum(lengths) + 2))
    rng.shuffle(blocks)
    tables = torch.full((len(sizes) + 2, max(lengths) + 2), 2**30, dtype=torch.int32)
    order, queries = list(range(len(sizes) + 2)), []
    rng.shuffle(order)
    for i, (new, total) in enumerate(sizes):
        generator = torch.Generator().manual_seed(1000 * seed + i)
        rows = torch.randn((2, total, heads[1], dim), generator=generator).to(dtypes[1])
        queries.append(torch.randn((max(total, 1), heads[0], dim), generator=generator)[max(total, 1) - new :])
        first = 0 if window is None else max(0, total - new - window + 1)
        for at in range(first, total):
            if at == first or at % block_size == 0:
                tables[order[i], at // block_size] = block = blocks.pop()
            keys[block, at % block_size], values[block, at % block_size] = rows[0, at], rows[1, at]
    first_rows = [sum(new for new, _ in sizes[:i]) for i in range(len(sizes) + 1)]
    ints = [first_rows, [total for _, total in sizes], order[: len(sizes)]]
    starts, totals, table_rows = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ints)
    tensors = SpanTensors(starts, totals, table_rows, tables.to(DEVICE))
    spans = Spans([new for new, _ in sizes], ints[1], tables[order[: len(sizes)]].to(DEVICE), tensors)
    return spans, torch.cat(queries).to(DEVICE, dtypes[0]), (keys, values)


def expected_of(step: Step, call: AttentionCall, sinks: torch.Tensor | None) -> torch.Tensor:
    """The reference, which reads keys that a window hides: here they are zeros."""
    spans, q, cache = step
    tables = spans.block_tables.clamp(max=len(cache[0]) - 1)
    clean = (cache[0].nan_to_num(), cache[1].nan_to_num())
    live = [i for i, total in enumerate(spans.total_tokens) if total]
    first = [sum(spans.new_tokens[:i]) for i in range(len(spans.new_tokens))]
    out = torch.zeros_like(q)
    for i in live:
        one = Spans([spans.new_tokens[i]], [spans.total_tokens[i]], tables[i : i + 1])
        rows = slice(first[i], first[i] + spans.new_tokens[i])
        out[rows] = ReferenceAttention().run(q[rows], clean, one, call, sinks)
    return out


def check(
    step: Step,
    call: AttentionCall = PLAIN,
    sinks: torch.Tensor | None = None,
    *,
    splits: int | None = None,
    backend: TritonAttention | None = None,
    tolerance: float = 2e-5,
    layers: int = 1,
) -> torch.Tensor:
    """`layers` of one step; `splits` forces how often keys are split."""
    spans, q, cache = step
    backend = backend or TritonAttention()
    plan = backend.plan(spans)
    if splits is not None:
        plan.splits[cache[0].shape[2], call.window] = splits
    expected = expected_of(step, call, sinks)
    assert bool(expected.isfinite().all())
    for _ in range(layers):
        got = backend.run(q, cache, plan, call, sinks)
        assert got.shape == q.shape and got.dtype == q.dtype
        torch.testing.assert_close(got, expected, atol=tolerance, rtol=10 * tolerance)
    assert not plan.counters.any(), "the counters must be as they were found"
    return got


@pytest.mark.parametrize("splits", [1, 2, 3, 8])
def test_decode_in_any_number_of_parts(splits: int) -> None:
    """Padding between sequences, lengths around tiles, parts that have no keys."""
    step = make_step([(1, total) for total in (200, 1, 0, 64, 65, 0)], heads=(4, 1))
    check(step, splits=splits, layers=2)
    check(step, PLAIN, torch.randn(4, device=DEVICE), splits=splits)


def test_queries_may_be_a_slice() -> None:
    """Layers without rope give the query part of one product as it is."""
    spans, q, cache = make_step([(1, 70), (1, 5), (9, 40)])
    wide = torch.cat((q, torch.full_like(q, torch.nan)), 1)
    check((spans, wide[:, : q.shape[1]], cache))


def test_decode_that_overlaps(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for ahead changes nothing, also where there are few keys or none."""
    monkeypatch.setattr(overlap, "_is_on", True)
    for splits in (1, 3):
        check(make_step([(1, total) for total in (130, 1, 0, 64)], heads=(4, 1)), splits=splits)


@pytest.mark.parametrize("window", [1, 37, 70])
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_reads_nothing_that_left_the_window(window: int, splits: int) -> None:
    sizes = [(1, total) for total in (150, 5, 64)]
    check(make_step(sizes, window=window, heads=(2, 1)), AttentionCall(0.3, window), splits=splits)


@pytest.mark.parametrize("heads", [(2, 2), (4, 2), (8, 1), (6, 2), (20, 1)])
def test_groups_of_heads(heads: tuple[int, int]) -> None:
    """Also those that no power of two holds, and larger ones than a tile's sixteen rows."""
    sinks = torch.randn(heads[0], device=DEVICE)
    check(make_step([(1, 90), (7, 50), (3, 3)], heads=heads), PLAIN, sinks, splits=2)
    check(make_step([(1, 90)], heads=heads), PLAIN, sinks, splits=1)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
def test_head_dims(dim: int) -> None:
    check(make_step([(1, 70), (9, 30)], heads=(4, 1), dim=dim), AttentionCall(dim**-0.5), splits=2)


@pytest.mark.parametrize("block_size", [8, 16, 32, 64])
@pytest.mark.parametrize("is_head_major", [False, True])
def test_block_sizes_and_layouts(block_size: int, is_head_major: bool) -> None:
    sizes = [(1, 150), (20, 100), (5, 5)]
    check(make_step(sizes, heads=(4, 2), block_size=block_size, is_head_major=is_head_major), splits=2)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("call", [AttentionCall(0.2), AttentionCall(0.3, 37), AttentionCall(0.4, None, 3.0)])
def test_prompts_chunks_and_drafts(call: AttentionCall, sinks: bool) -> None:
    """All in one launch, with decoding sequences before and between them and tiles that only some rows see whole."""
    sizes = [(1, 9), (130, 130), (4, 70), (1, 33), (40, 150), (2, 2)]
    extra = torch.randn(4, device=DEVICE) if sinks else None
    check(make_step(sizes, heads=(4, 1), window=call.window), call, extra)


@pytest.mark.parametrize("window", [1, 64, 100])
def test_windows_of_every_kind_in_a_chunk(window: int) -> None:
    check(make_step([(150, 150), (40, 190)], heads=(2, 1), window=window), AttentionCall(0.3, window))


@pytest.mark.parametrize("dim", [264, 512])
def test_wide_heads(dim: int) -> None:
    """As those of Gemma 4's full layers."""
    step = make_step([(1, 40), (1, 5), (20, 30), (3, 3)], heads=(2, 1), dim=dim)
    for splits in (1, 2):
        check(step, AttentionCall(0.06), splits=splits, tolerance=4e-5)


def test_random_steps() -> None:
    for seed in range(8):
        rng = random.Random(seed)
        torch.manual_seed(seed)
        sizes = [(1, rng.randint(1, 90)) for _ in range(rng.randint(0, 3))]
        for _ in range(rng.randint(1, 4)):
            new = rng.choice([1, 2, 5, rng.randint(1, 70)])
            sizes.append((new, new + rng.choice([0, 1, rng.randint(0, 80)])))
        kv_heads = rng.choice([1, 2, 3])
        heads = (kv_heads * rng.choice([1, 2, 3, 4]), kv_heads)
        window = rng.choice([None, None, 3, 40])
        step = make_step(sizes, heads=heads, dim=rng.choice([16, 24]), window=window, seed=seed)
        sinks = torch.randn(heads[0], device=DEVICE) if rng.random() < 0.3 else None
        call = AttentionCall(0.3, window, rng.choice([None, 5.0]))
        check(step, call, sinks, splits=rng.choice([1, 2, 5]))


@pytest.mark.parametrize(
    ("dtypes", "tolerance"),
    [
        ((torch.bfloat16, torch.bfloat16), 1.6e-2),
        ((torch.float16, torch.float16), 2e-3),
        ((torch.float32, torch.bfloat16), 2e-5),
        ((torch.bfloat16, torch.float32), 1.6e-2),
        ((torch.float16, torch.bfloat16), 1e-3),
    ],
)
def test_dtypes(dtypes: tuple[torch.dtype, torch.dtype], tolerance: float) -> None:
    step = make_step([(1, 100), (70, 100)], heads=(4, 1), dim=64, dtypes=dtypes)
    for splits in (1, 2):
        check(step, AttentionCall(0.125), splits=splits, tolerance=tolerance)


def test_deterministic_rows_do_not_depend_on_their_step() -> None:
    """Bit for bit: a token alone, in a chunk of any size, and with other sequences around."""
    backend = TritonAttention()
    backend.is_deterministic = True
    for call, dtype in ((PLAIN, torch.bfloat16), (AttentionCall(0.2, 50), torch.float32)):
        spans, q, cache = step = make_step([(150, 150)], heads=(4, 1), dtypes=(dtype, dtype))
        whole = check(step, call, backend=backend, tolerance=1.6e-2)
        tensors = spans.tensors
        assert tensors is not None
        for new, total in ((1, 150), (1, 97), (37, 97), (64, 150), (3, 66)):
            first_rows, totals = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([0, new], [total]))
            cut = Spans([new], [total], spans.block_tables, replace(tensors, first_rows=first_rows, totals=totals))
            rows = slice(total - new, total)
            assert torch.equal(backend.run(q[rows], cache, backend.plan(cut), call), whole[rows])
        spans, q, cache = make_step([(150, 150), (1, 80), (20, 33), (1, 7)], heads=(4, 1), dtypes=(dtype, dtype))
        assert torch.equal(backend.run(q, cache, backend.plan(spans), call)[:150], whole)
    assert backend.launch_shape(spans) == () and backend.splits([30000], 1, None) == 1


def test_plans_without_tensors_make_them() -> None:
    spans, q, cache = make_step([(1, 30), (20, 40)])
    tables = spans.block_tables.clamp(max=len(cache[0]) - 1).to(torch.int64)
    check((replace(spans, block_tables=tables, tensors=None), q, cache))


def test_splits_follow_the_work() -> None:
    """Few, long and uneven sequences are split, many even ones are not; never into more parts than are planned for."""
    backend = TritonAttention()
    assert backend.splits([576] * 256, 8, None) == 1
    assert backend.splits([MIN_PART], 8, None) == 1
    assert backend.splits([32768], 8, None) == SPLITS[-1]
    assert backend.splits([32768] + [500] * 31, 8, None) == SPLITS[-1]
    assert backend.splits([32768], 8, MIN_PART) == 1
    for seqs in (1, 3, 17, 256, 4096):
        for totals in ([32768] * seqs, [1] * (seqs - 1) + [100000]):
            for kv_heads in (1, 8, 32):
                splits = backend.splits(totals, kv_heads, None)
                assert splits == 1 or splits * seqs * kv_heads <= MAX_PARTS


def kinds(notes: LaunchNotes) -> set[object]:
    """What must be compiled: kernels, dtypes and constants; numbers among the arguments are not specialised."""
    return {
        (launch.kernel, *(a for a in launch.arguments if not isinstance(a, int)), *sorted(launch.options.items()))
        for launch in notes.launches.values()
    }


def test_a_graphs_launches_follow_from_its_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal launch shapes and sizes: equal launches, whatever the lengths."""
    monkeypatch.setattr(overlap, "_is_on", True)
    backend, spec = TritonAttention(), AttentionSpec(CacheSpec("full", 2, 64, 2), 8)
    backend._kinds[2, None] = None
    q, cache, one, call, _ = next(backend.warm_examples(spec, (torch.float16, torch.float16), 16, 0.1))
    by_shape: dict[object, set[object]] = {}
    for total in (1, 5, 100, 200, 300, 400, 600, 1000, 1030, 5000, 30000):
        spans = replace(one, total_tokens=[total])
        with noting() as notes:
            backend.run(q, cache, backend.plan(spans), call)
        (launch,) = notes.launches.values()
        by_shape.setdefault(backend.launch_shape(spans), set()).add((launch.arguments[11], *kinds(notes)))
    assert len(by_shape) > 3 and all(len(launches) == 1 for launches in by_shape.values())


def test_warm_examples_name_every_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that a step launches is left to be compiled later."""
    steps = ([(1, 5)], [(1, 5000)], [(1, 300)], [(1, 9), (3, 20)], [(16, 30), (17, 30)], [(1, 10)] * 40, [(300, 400)])
    steps += tuple([(1, total)] * count for count, total in ((200, 10), (600, 10), (600, 2000), (600, 5000)))
    for dtype, overlaps in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        monkeypatch.setattr(overlap, "_is_on", overlaps)
        backend, spec = TritonAttention(), AttentionSpec(CacheSpec("full", 2, 64, dtype.itemsize), 8)
        with noting() as warm:
            for q, cache, spans, call, sinks in backend.warm_examples(spec, (dtype, dtype), 16, 0.1):
                backend.run(q, cache, backend.plan(spans), call, sinks)
        with noting() as notes:
            for sizes in steps:
                spans, q, cache = make_step([(1, 5)], heads=(8, 2), dim=64, dtypes=(dtype, dtype))
                spans = replace(spans, new_tokens=[new for new, _ in sizes], total_tokens=[total for _, total in sizes])
                backend.run(q, cache, backend.plan(spans), AttentionCall(0.1))
        assert kinds(notes) == kinds(warm)


def dense(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, call: AttentionCall, *, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """What cuDNN is asked for, in plain torch."""
    k, v = (t.transpose(0, 1).repeat_interleave(q.shape[1] // len(t), 1) for t in (keys, values))
    assert bool(k.isfinite().all()) and bool(v.isfinite().all())
    q = q.nan_to_num()  # rows of padding are anything
    scores = torch.einsum("qhd,khd->hqk", q, k) * call.scale
    if is_causal:
        scores.masked_fill_(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).contiguous(), scores.logsumexp(-1).contiguous()


def test_long_prompts_through_dense_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Histories and chunks that are no multiples of anything, between short sequences and decodes."""
    monkeypatch.setattr(cudnn, "attend_dense", dense)
    monkeypatch.setattr(cudnn, "LONG", 40)
    monkeypatch.setattr(cudnn, "HISTORY_STEP", 32)
    monkeypatch.setattr(cudnn, "SQUARE_STEP", 16)
    monkeypatch.setattr(cudnn, "LONG_AFTER", 20)
    monkeypatch.setattr(cudnn, "LONG_HISTORY", 100)
    for sizes in ([(48, 48)], [(1, 20), (5, 9), (50, 120), (40, 72), (3, 50), (64, 64), (41, 130), (25, 125), (2, 2)]):
        check(make_step(sizes, heads=(4, 1)), backend=CudnnAttention())
