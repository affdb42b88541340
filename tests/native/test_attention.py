"""ATTENTION against float64 mathematics: formats, instruction sets, head sizes, groups, windows, caps, sinks, mixed spans."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from samovar.native.abi import Count, Format, Op
from samovar.native.library import NativeError
from samovar.native.team import Team
from tests.native.cache_formats import FORMATS, numbers, row_bytes, store
from tests.native.single_op import ISAS, run_op

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
FLOAT, BF16 = 2.0**-24, 2.0**-9
"""Relative errors of one rounding."""
NOT_READ = 1 << 28
"""Fills block tables past a sequence's blocks: reading there ends the process."""


@pytest.fixture(scope="module", params=ISAS)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team(2, request.param) as team:
        yield team


@dataclass
class Case:
    """A step: `spans` are (new, total) tokens of each sequence; foreign slots of the caches are NaN."""

    form: Format
    spans: list[tuple[int, int]]
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    last_only: bool = False
    seed: int = 0
    scale: float = field(init=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.scale = self.dim**-0.5 * 1.3
        blocks = [-(-total // self.block_size) for _, total in self.spans]
        order = rng.permutation(sum(blocks) + 2).astype(np.int32)
        self.tables = np.full((len(blocks), max(blocks) + 1), NOT_READ, dtype=np.int32)
        shape = (len(order) * self.block_size, self.kv_heads, row_bytes(self.form, self.dim))
        self.keys, self.values = np.full((2, *shape), 0xFF, dtype=np.uint8)  # NaN in every format
        self.own: list[tuple[Doubles, Doubles]] = []
        at = 0
        for n, (_, total) in enumerate(self.spans):
            self.tables[n, : blocks[n]] = order[at : at + blocks[n]]
            at += blocks[n]
            slots = (
                self.tables[n, np.arange(total) // self.block_size] * self.block_size
                + np.arange(total) % self.block_size
            )
            own = []
            for cache in (self.keys, self.values):
                size = rng.uniform(0.3, 2, (total, self.kv_heads, 1))
                cache[slots] = store(
                    self.form, (rng.standard_normal((total, self.kv_heads, self.dim)) * size).astype(np.float32)
                )
                own.append(numbers(self.form, cache[slots]))
            self.own.append((own[0], own[1]))
        tokens = sum(new for new, _ in self.spans)
        self.q = np.full((tokens, self.heads * self.dim + 24), np.nan, dtype=np.float32)
        self.q[:, :-24] = rng.standard_normal((tokens, self.heads * self.dim))
        self.sinks = rng.standard_normal(self.heads).astype(np.float32) if self.has_sinks else None

    def run(self, team: Team) -> Floats:
        """What the library computes: [rows, heads * dim]."""
        new = [new for new, _ in self.spans]
        first_rows = np.concatenate(([0], np.cumsum(new))).astype(np.int32)
        totals = np.array([total for _, total in self.spans], dtype=np.int32)
        attends = np.arange(len(new), dtype=np.int32)[::-1].copy()
        rows = len(new) if self.last_only else len(self.q)
        y = np.full((rows, self.heads * self.dim + 7), 7.5, dtype=np.float32)
        step = {
            "num_sequences": len(new), "first_rows": first_rows, "totals": totals, "tables": self.tables,
            "table_width": self.tables.shape[1], "block_size": self.block_size, "attends": attends,
        }  # fmt: skip
        constants = {
            "i": [self.heads, self.kv_heads, self.dim, 0, self.form, self.window, int(self.last_only)],
            "f": [self.scale, self.softcap], "p": [self.keys, self.values, self.sinks],
            "count": Count.ROWS if self.last_only else Count.TOKENS,
        }  # fmt: skip
        run_op(team, Op.ATTENTION, rows, [self.q, y], ([0], [1]), constants, step)
        assert (y[:, -7:] == 7.5).all(), "columns behind the result were written"
        return y[:, :-7]

    def expected(self, is_wide: bool) -> tuple[Doubles, Doubles]:
        """The result in float64, and how far a float32 (`is_wide`: on tiles, a bfloat16) computation may be from it.

        A score is off by a rounding of every factor (and of every sum, in float32); a softmax over scores that are off by at most d is off
        by a factor of at most e^2d; weights and values are rounded once more.
        """
        results, bounds, row = [], [], 0
        for (new, total), (keys, values) in zip(self.spans, self.own, strict=True):
            q = self.q[row : row + new, : self.heads * self.dim].reshape(new, self.heads, self.dim).astype(np.float64)
            row += new
            k, v = (x.repeat(self.heads // self.kv_heads, axis=1) for x in (keys, values))
            scores = np.einsum("qhd,khd->hqk", q, k) * self.scale
            terms = np.einsum("qhd,khd->hqk", np.abs(q), np.abs(k)) * self.scale
            off = terms * (2.1 * BF16 if is_wide else FLOAT * (self.dim // 8 + 12)) + np.abs(scores) * 4 * FLOAT
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
                off += 8 * FLOAT * self.softcap
            queries, at = np.arange(total - new, total)[:, None], np.arange(total)[None]
            hidden = (at > queries) | ((at <= queries - self.window) if self.window else False)
            scores[:, hidden], off[:, hidden] = -np.inf, 0
            most = scores.max(axis=2, keepdims=True)
            weights = np.exp(scores - most)
            sums = weights.sum(axis=2, keepdims=True)
            if self.sinks is not None:
                sums = sums + np.exp(self.sinks.astype(np.float64)[:, None, None] - most)
            weights /= sums
            error = np.expm1(2.02 * off.max(axis=2)) + (5 * BF16 if is_wide else FLOAT * (40 + total / 16))
            results.append(np.einsum("hqk,khd->qhd", weights, v).reshape(new, -1))
            spread = np.einsum("hqk,khd->qhd", weights, np.abs(v))
            bounds.append((spread * error.T[:, :, None]).reshape(new, -1) + 1e-30)
        if self.last_only:
            return np.array([part[-1] for part in results[::-1]]), np.array([part[-1] for part in bounds[::-1]])
        return np.concatenate(results), np.concatenate(bounds)

    def check(self, team: Team) -> None:
        """The library's result is within the bounds."""
        got = self.run(team)
        is_wide = team.isa == "amx" and self.form is not Format.F32
        expected, bound = self.expected(is_wide)
        assert np.isfinite(expected).all()
        far = np.abs(got - expected) / bound
        assert (far <= 1).all(), f"off by {np.nanmax(far):.3g} bounds; NaN: {np.isnan(got).sum()}"


SPANS = {
    "decode": [(1, 1), (1, 2), (1, 15), (1, 16), (1, 17), (1, 63), (1, 64), (1, 65), (1, 300)],
    "prefill": [(70, 70), (1, 1), (33, 33)],
    "chunks": [(5, 300), (64, 129), (31, 32), (2, 2)],
    "mixed": [(1, 40), (17, 90), (1, 257), (70, 71), (3, 3)],
}


@pytest.mark.parametrize("spans", SPANS.values(), ids=SPANS.keys())
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_format(team: Team, form: Format, spans: list[tuple[int, int]]) -> None:
    Case(form, spans).check(team)


@pytest.mark.parametrize("dim", [8, 16, 24, 32, 40, 72, 80, 96, 128, 256])
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_head_size(team: Team, form: Format, dim: int) -> None:
    """Rows of 8 more than a multiple of 16 lie at the cache's very end, too."""
    Case(form, [(1, 50), (21, 60)], heads=3, kv_heads=1, dim=dim, block_size=5, seed=dim).check(team)


@pytest.mark.parametrize(
    "heads",
    [(1, 1), (2, 1), (3, 1), (4, 1), (5, 1), (6, 1), (7, 1), (8, 1), (9, 3), (71, 1), (32, 8), (12, 12), (220, 1)],
)
@pytest.mark.parametrize("form", [Format.F32, Format.BF16, Format.KV_I8], ids=lambda form: form.name)
def test_every_group(team: Team, form: Format, heads: tuple[int, int]) -> None:
    Case(form, [(1, 90), (19, 40), (1, 7)], heads=heads[0], kv_heads=heads[1], dim=32, seed=heads[0]).check(team)


@pytest.mark.parametrize("window", [0, 1, 2, 16, 37, 64, 1000])
@pytest.mark.parametrize("softcap", [0.0, 2.5])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_windows_caps_and_sinks(team: Team, window: int, softcap: float, has_sinks: bool) -> None:
    for form in (Format.F32, Format.BF16, Format.KV_I8):
        spans = [(1, 150), (40, 140), (1, 3), (66, 66)]
        Case(form, spans, window=window, softcap=softcap, has_sinks=has_sinks, dim=40, seed=window).check(team)


@pytest.mark.parametrize("form", [Format.F32, Format.BF16], ids=lambda form: form.name)
def test_long_sequences_are_cut_and_merged(team: Team, form: Format) -> None:
    """Few sequences of many keys: several threads compute one row's result, with sinks counted once."""
    for spans in ([(1, 3001)], [(1, 1), (1, 2100)], [(3, 2500)], [(40, 1900), (1, 1700)]):
        for has_sinks in (False, True):
            Case(form, spans, heads=6, kv_heads=2, dim=32, has_sinks=has_sinks, block_size=32).check(team)


def test_results_do_not_depend_on_timing(team: Team) -> None:
    case = Case(Format.BF16, [(1, 2000), (1, 900), (33, 700)], heads=9, kv_heads=3)
    first = case.run(team)
    for _ in range(20):
        assert (case.run(team) == first).all()


@pytest.mark.parametrize("form", [Format.F32, Format.BF16], ids=lambda form: form.name)
def test_results_depend_neither_on_threads_nor_on_the_batch(team: Team, form: Format) -> None:
    """Bit for bit: whoever computes which piece, and whoever else is there."""
    spans = [(1, 700), (64, 600), (1, 2), (1, 1500), (130, 130), (3, 2300), *[(1, 9)] * 20]
    case = Case(form, spans, heads=9, kv_heads=3, dim=24)
    with Team(1, team.isa) as alone:
        expected = case.run(alone)
    case.check(team)
    for threads in (2, 3, 8):
        with Team(threads, team.isa) as others:
            assert (case.run(others) == expected).all()
    q, tables, at = case.q, case.tables, 0
    for n, span in enumerate(spans[:7]):
        case.spans, case.q, case.tables = [span], q[at : at + span[0]], tables[n : n + 1]
        assert (case.run(team) == expected[at : at + span[0]]).all()
        at += span[0]


@pytest.mark.parametrize("form", [Format.F32, Format.BF16, Format.KV_FP8_E4M3], ids=lambda form: form.name)
def test_only_the_last_rows(team: Team, form: Format) -> None:
    """Row n of the result is sequence attends[n], in any order."""
    Case(form, [(1, 70), (20, 55), (7, 7), (1, 1)], heads=6, last_only=True, window=30).check(team)
    Case(form, [(9, 40)], heads=16, kv_heads=1, last_only=True).check(team)


def test_large_scores_and_equal_keys(team: Team) -> None:
    """Weights that all but vanish, and maxima that grow from block to block."""
    for form in (Format.F32, Format.BF16):
        case = Case(form, [(1, 200), (50, 200)], dim=32)
        case.scale = 5.0
        case.check(team)


def test_nan_reaches_the_result(team: Team) -> None:
    for form in (Format.F32, Format.BF16, Format.KV_FP8_E4M3):
        for cache in ("keys", "values"):
            case = Case(form, [(1, 40), (20, 40)])
            slot = case.tables[:, 1] * case.block_size + 2
            getattr(case, cache)[slot] = 0xFF
            assert np.isnan(case.run(team)).any(axis=1).all(), (form, cache)


@pytest.mark.parametrize("form", [Format.BF16, Format.KV_I8], ids=lambda form: form.name)
@pytest.mark.parametrize(
    ("dim", "heads", "block_size", "window"),
    [(64, (9, 3), 16, 0), (64, (4, 4), 32, 37), (128, (8, 2), 16, 300), (192, (2, 1), 64, 0), (256, (6, 2), 16, 9)],
)
def test_decode_is_exact_to_16_bits(
    team: Team, form: Format, dim: int, heads: tuple[int, int], block_size: int, window: int
) -> None:
    """With few heads for each of the cache's, in every set: queries and weights in two parts where tiles are too coarse."""
    spans = [(1, total) for total in (1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 600)]
    case = Case(form, spans, *heads, dim, block_size, window, has_sinks=dim == 128, seed=dim + window)
    got, (expected, bound) = case.run(team), case.expected(is_wide=False)
    for n, ((_, total), (keys, values)) in enumerate(zip(spans, case.own, strict=True)):
        seen = slice(max(0, total - window) if window else 0, total)
        group = heads[0] // heads[1]
        q = case.q[n, : heads[0] * dim].reshape(heads[0], dim)
        k, v = (np.abs(x[seen]).repeat(group, axis=1) for x in (keys, values))
        # A query is off by 2^-16 of its largest number, a weight by 2^-17 of the largest product of a weight and a value.
        off = np.abs(q).max(axis=1) * k.sum(axis=2).max(axis=0) * case.scale * 2**-16
        most = v.max(axis=(0, 2))
        slack = most * (np.expm1(2.02 * off) + (total + 1) * 2**-17)
        bound[n] += slack.repeat(dim)
    far = np.abs(got - expected) / bound
    assert (far <= 1).all(), f"off by {np.nanmax(far):.3g} bounds; NaN: {np.isnan(got).sum()}"


@pytest.mark.parametrize("form", [Format.BF16, Format.KV_I8], ids=lambda form: form.name)
@pytest.mark.parametrize("where", ["keys", "values", "q"])
def test_nan_reaches_a_decoded_row(team: Team, form: Format, where: str) -> None:
    case = Case(form, [(1, 40), (1, 300)], heads=6, kv_heads=2)
    if where == "q":
        case.q[:, 5:130:64] = np.nan
    else:
        getattr(case, where)[case.tables[:, 1] * case.block_size + 2] = 0xFF
    assert np.isnan(case.run(team)).any(axis=1).all()


@pytest.mark.parametrize("seed", range(25))
def test_random_steps(team: Team, seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)

    def pick(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    spans = [
        (new, new + pick(0, 0, int(rng.integers(301))))
        for new in (pick(1, 1, 2, int(rng.integers(1, 71))) for _ in range(pick(1, 2, 6)))
    ]
    kv_heads = pick(1, 2, 3)
    Case(
        pick(*FORMATS), spans, kv_heads * pick(1, 2, 3, 4, 5, 8, 9), kv_heads, 8 * int(rng.integers(1, 17)), pick(1, 7, 16, 32, 64),
        pick(0, 0, 1, 5, 70), pick(0.0, 0.0, 4.0), bool(rng.random() < 0.3), seed=seed,
    ).check(team)  # fmt: skip


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dim": 12}, "multiple of 8"),
        ({"dim": 264}, "multiple of 8 up to 256"),
        ({"heads": 3}, "multiple of"),
    ],
)
def test_what_cannot_be_run_is_refused(team: Team, change: dict[str, int], words: str) -> None:
    case = Case(Format.F32, [(1, 4)])
    for name, value in change.items():
        setattr(case, name, value)
    case.q = np.zeros((1, 4096), dtype=np.float32)
    with pytest.raises(NativeError, match=words):
        case.run(team)
