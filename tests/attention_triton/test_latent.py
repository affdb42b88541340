"""The Triton kernels over latent rows against the reference: in the interpreter where there is no GPU, small sizes.

Everything that a program must not read is NaN, and table entries past a sequence's end name no block at all.
"""

from __future__ import annotations

import random

import pytest
import torch

from samovar.attention import latent_on_gpu
from samovar.attention.base import AttentionCall, AttentionSpec, Spans, SpanTensors
from samovar.attention.latent_on_gpu import ABSORBED, MADE, LatentTiles, Part, absorb, attend_latent
from samovar.attention.reference import ReferenceAttention
from samovar.attention.triton import TritonAttention, TritonPlan
from samovar.core.cache_spec import CacheSpec, LatentDims
from samovar.core.device_facts import DeviceFacts
from samovar.kernels.triton_launch import LaunchNotes, noting

pytest.importorskip("triton", reason="Triton is not installed")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = LatentDims(rank=24, rope=8, nope=12, value=20)
Step = tuple[Spans, torch.Tensor, tuple[torch.Tensor, torch.Tensor], AttentionCall]


def make_step(
    sizes: list[tuple[int, int]],
    *,
    heads: int = 5,
    dims: LatentDims = SMALL,
    block_size: int = 16,
    dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> Step:
    """Sequences of (new, total) tokens."""
    rng, generator = random.Random(0), torch.Generator().manual_seed(0)
    lengths = [-(-total // block_size) for _, total in sizes]
    rows = torch.full((sum(lengths) + 2, block_size, 1, dims.row), torch.nan)
    blocks, order = list(range(len(rows))), list(range(len(sizes) + 2))
    rng.shuffle(blocks)
    rng.shuffle(order)
    tables = torch.full((len(sizes) + 2, max(lengths) + 2), 2**30, dtype=torch.int32)
    for i, (_, total) in enumerate(sizes):
        for at in range(0, total, block_size):
            tables[order[i], at // block_size] = block = blocks.pop()
            count = min(block_size, total - at)
            rows[block, :count] = torch.randn((count, 1, dims.row), generator=generator)
    count = sum(new for new, _ in sizes)
    q = torch.randn((count, heads, dims.query), generator=generator)
    expansion = torch.randn((heads, dims.nope + dims.value, dims.rank), generator=generator) * dims.rank**-0.5
    first_rows = [sum(new for new, _ in sizes[:i]) for i in range(len(sizes) + 1)]
    ints = [first_rows, [total for _, total in sizes], order[: len(sizes)]]
    starts, totals, table_rows = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ints)
    tensors = SpanTensors(starts, totals, table_rows, tables.to(DEVICE))
    spans = Spans([new for new, _ in sizes], ints[1], tables[order[: len(sizes)]].to(DEVICE), tensors)
    cache = rows.to(DEVICE, dtypes[1]), expansion.to(DEVICE, dtypes[0])
    return spans, q.to(DEVICE, dtypes[0]), cache, AttentionCall(dims.query**-0.5, latent=dims)


def expected_of(step: Step) -> torch.Tensor:
    """The reference; zeros for sequences without keys."""
    spans, q, cache, call = step
    assert call.latent is not None
    out, first = q.new_zeros((*q.shape[:2], call.latent.value)), 0
    tables = spans.block_tables.clamp(max=len(cache[0]) - 1)
    for i, (new, total) in enumerate(zip(spans.new_tokens, spans.total_tokens, strict=True)):
        if total:
            one = Spans([new], [total], tables[i : i + 1])
            rows = slice(first, first + new)
            out[rows] = ReferenceAttention().run(q[rows], cache, one, call)
        first += new
    return out


def near(got: torch.Tensor, step: Step, tolerance: float = 1e-5) -> None:
    expected = expected_of(step)
    assert bool(expected.isfinite().all())
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=10 * tolerance)


def planned(step: Step) -> TritonPlan:
    return TritonAttention().plan(step[0])


@pytest.mark.parametrize(("splits", "heads"), [(1, 5), (2, 16), (3, 20), (8, 5)])
def test_decode_in_any_number_of_parts(splits: int, heads: int) -> None:
    """Padding between sequences, lengths around tiles, parts that have no keys, tiles cut off at the last head."""
    step = make_step([(1, total) for total in (100, 1, 0, 32, 33, 0)], heads=heads)
    _spans, q, cache, call = step
    out = q.new_empty((6, heads, SMALL.value))
    absorb(out, q, cache, planned(step), call, Part(0, 6, 0, 6), splits=splits)
    near(out, step)


@pytest.mark.parametrize(("splits", "tiles"), [(4, LatentTiles(16, 16, 4, 1)), (1, LatentTiles(64, 32, 4, 1))])
def test_chunks_are_absorbed(splits: int, tiles: LatentTiles) -> None:
    """Sequences that begin inside a tile's worth of rows, one of a single token among them, some without history."""
    step = make_step([(1, 9), (7, 7), (1, 40), (3, 70), (20, 33)])
    _spans, q, cache, call = step
    out = torch.full((32, 5, SMALL.value), torch.nan, device=DEVICE)
    absorb(out, q, cache, planned(step), call, Part(1, 5, 1, 31), tiles, splits)
    assert bool(out[0].isnan().all())
    near(torch.cat((expected_of(step)[:1], out[1:])), step)


@pytest.mark.parametrize(("makes", "most"), [(True, 1 << 20), (True, 16), (True, 50), (False, 1), (None, 50)])
def test_mixed_steps(makes: bool | None, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding sequences, then chunks, whichever way they go; keys are made of all, of some, or of one in passes."""
    if makes is not None:
        monkeypatch.setattr(latent_on_gpu, "expands", lambda new, total, dims: makes)
    monkeypatch.setattr(latent_on_gpu, "made_at_once", lambda *sizes: most)
    step = make_step([(1, 30), (1, 5), (17, 17), (5, 33), (1, 19), (18, 52), (2, 2)], heads=3)
    _spans, q, cache, call = step
    near(attend_latent(q, cache, planned(step), call), step)


@pytest.mark.parametrize("makes", [True, False])
def test_16_bits(makes: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are averages of values near one, rounded as often as there are products: to a few units of bfloat16."""
    monkeypatch.setattr(latent_on_gpu, "expands", lambda new, total, dims: makes)
    step = make_step([(1, 70), (18, 60)], dtypes=(torch.bfloat16, torch.bfloat16))
    near(attend_latent(step[1], step[2], planned(step), step[3]), step, 1.6e-2)


def test_a_cache_of_another_type_than_queries() -> None:
    step = make_step([(1, 40), (5, 30), (30, 30)], dtypes=(torch.float32, torch.bfloat16))
    near(attend_latent(step[1], step[2], planned(step), step[3]), step)


def spec_of(heads: int, dims: LatentDims) -> AttentionSpec:
    return AttentionSpec(CacheSpec("latent", 1, dims.row, 2, latent=dims), heads)


def test_what_is_accepted() -> None:
    facts = DeviceFacts(kind="cuda", name="", architecture="sm_90", total_bytes=1, available_bytes=1, num_threads=1)
    backend = TritonAttention()
    assert backend.accepts(spec_of(16, LatentDims(512, 64, 128, 128)), facts) is None
    assert "more than 640" in str(backend.accepts(spec_of(16, LatentDims(1024, 64, 128, 128)), facts))
    backend.is_deterministic = True
    assert "depends on the batch" in str(backend.accepts(spec_of(16, LatentDims(512, 64, 128, 128)), facts))


def test_a_graphs_launches_follow_from_its_shape() -> None:
    """Equal launch shapes and sizes: equal launches, whatever the lengths."""
    dims = LatentDims(512, 64, 128, 128)
    backend, spec = TritonAttention(), spec_of(16, dims)
    facts = DeviceFacts(kind="cuda", name="", architecture="sm_90", total_bytes=1, available_bytes=1, num_threads=1)
    assert backend.accepts(spec, facts) is None
    by_shape: dict[object, set[object]] = {}
    for total in (1, 5, 100, 200, 300, 400, 600, 1000, 1030, 5000, 30000):
        examples = backend.warm_examples(spec, (torch.bfloat16, torch.bfloat16), 16, 0.1)
        q, cache, spans, call, _ = next(examples)
        spans = Spans([1], [total], spans.block_tables[:1], spans.tensors)
        with noting() as notes:
            backend.run(q[:1], cache, backend.plan(spans), call)
        by_shape.setdefault(backend.launch_shape(spans), set()).add(kinds(notes))
    assert len(by_shape) > 3 and all(len(launches) == 1 for launches in by_shape.values())


def kinds(notes: LaunchNotes) -> tuple[object, ...]:
    """What tells launches apart."""
    return tuple(sorted(notes.launches, key=str))


def test_every_tile_is_a_whole_number_of_matrix_instructions() -> None:
    for tiles in (*ABSORBED.values(), *MADE.values()):
        assert tiles.rows % 16 == 0 and tiles.keys % 16 == 0
