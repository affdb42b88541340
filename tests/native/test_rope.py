"""ROPE_WRITE against float64 and torch's conversions: norms, rotation, and every format of the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from samovar.native.abi import Format, Op
from samovar.native.library import NativeError
from samovar.native.team import Team
from tests.native.cache_formats import FORMATS, TORCH, numbers, row_bytes, store
from tests.native.single_op import ISAS, run_op

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
EMPTY = 0x5A


@pytest.fixture(scope="module", params=ISAS)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team(2, request.param) as team:
        yield team


def write(
    team: Team, form: Format, qkv: Floats, heads: tuple[int, int, int], tables: tuple[Floats, Floats] | None,
    norms: tuple[Floats | None, Floats | None], slots: NDArray[np.int64],
) -> tuple[Floats, Bytes, Bytes]:  # fmt: skip
    """(queries, keys, values) after one instruction; the caches have more slots than are written."""
    num_q, num_kv, dim = heads
    register = np.full((len(qkv), qkv.shape[1] + 5), 3.25, dtype=np.float32)
    register[:, :-5] = qkv
    keys, values = np.full((2, int(slots.max(initial=0)) + 3, num_kv, row_bytes(form, dim)), EMPTY, dtype=np.uint8)
    registers, operands = [register], [0, -1, -1]
    if tables is not None:
        registers, operands = [register, *tables], [0, 1, 2]
    rotary = 0 if tables is None else 2 * tables[0].shape[1]
    constants: dict[str, Any] = {"i": [num_q, num_kv, dim, rotary, form], "f": [1e-6], "p": [keys, values, *norms]}
    run_op(team, Op.ROPE_WRITE, len(qkv), registers, (operands, []), constants, {"slots": slots})
    assert (register[:, -5:] == 3.25).all()
    return register[:, : num_q * dim], keys, values


def expected_heads(x: Floats, w: Floats | None, tables: tuple[Floats, Floats] | None) -> NDArray[np.float64]:
    """x [tokens, heads, dim], normed and turned, in float64."""
    y = x.astype(np.float64)
    if w is not None:
        y = y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + 1e-6) * w
    if tables is not None:
        c, s = (table.astype(np.float64)[:, None] for table in tables)
        half = c.shape[-1]
        a, b = y[..., :half].copy(), y[..., half : 2 * half].copy()
        y[..., :half], y[..., half : 2 * half] = a * c - b * s, b * c + a * s
    return y


CASES = [
    # query heads, K/V heads, head size, rotary width, norms of q and k
    (9, 3, 64, 64, False, False),
    (4, 2, 16, 16, True, True),
    (16, 8, 128, 128, True, True),
    (7, 1, 80, 32, True, False),
    (2, 2, 96, 96, False, True),
    (3, 1, 24, 8, True, True),
    (4, 4, 256, 64, True, True),
    (2, 1, 8, 0, False, False),
    (3, 1, 40, 22, False, False),
]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(str(int(part)) for part in case))
def test_norm_rope_and_write(team: Team, form: Format, case: tuple[int, int, int, int, bool, bool]) -> None:
    """Keys are off by what float32 rounds before the conversion, which may then fall to the next number of the format."""
    num_q, num_kv, dim, rotary, has_q_norm, has_k_norm = case
    for tokens in (1, 2, 45):
        rng = np.random.default_rng(tokens)
        qkv = rng.standard_normal((tokens, (num_q + 2 * num_kv) * dim)).astype(np.float32)
        angle = rng.uniform(0, 6, (tokens, rotary // 2))
        tables = (np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)) if rotary else None
        norms = [rng.uniform(0.5, 1.5, dim).astype(np.float32) if has else None for has in (has_q_norm, has_k_norm)]
        slots = rng.permutation(tokens + 5)[:tokens]
        slots[2::3] = -1
        q, keys, values = write(team, form, qkv, (num_q, num_kv, dim), tables, (norms[0], norms[1]), slots)
        parts = np.split(qkv.reshape(tokens, -1, dim), [num_q, num_q + num_kv], axis=1)
        expected = expected_heads(parts[0], norms[0], tables)
        np.testing.assert_allclose(q.reshape(expected.shape), expected, rtol=0, atol=6e-6)
        kept = slots >= 0
        if kept.any():
            check_keys(form, keys[slots[kept]], expected_heads(parts[1], norms[1], tables)[kept])
            check_values(form, values[slots[kept]], parts[2][kept])
        others = np.setdiff1d(np.arange(len(keys)), slots[kept])
        assert (keys[others] == EMPTY).all() and (values[others] == EMPTY).all()


def check_values(form: Format, stored: Bytes, x: Floats) -> None:
    """Values are converted as they are: bit for bit."""
    assert (stored == store(form, x)).all()


def check_keys(form: Format, stored: Bytes, x: NDArray[np.float64]) -> None:
    """Half a step of the format, and a little for float32: 2^-p relative, the smallest step, or that of the int8 scale."""
    relative = {
        Format.F32: 2.0**-22,
        Format.F16: 2.0**-11,
        Format.BF16: 2.0**-8,
        Format.KV_FP8_E4M3: 2.0**-4,
        Format.KV_I8: 0,
    }
    most = np.abs(x).max(axis=-1, keepdims=True)
    smallest = most / 254 if form is Format.KV_I8 else {Format.KV_FP8_E4M3: 2.0**-10, Format.F16: 2.0**-25}.get(form, 0)
    bound = np.abs(x) * relative[form] + smallest + 6e-6
    assert (np.abs(numbers(form, stored) - x) <= bound).all()


def converted(team: Team, form: Format, x: Floats) -> Bytes:
    """x [n, 32] through the values of the cache."""
    qkv = np.concatenate((np.zeros_like(x), x), axis=1)
    _, _, values = write(team, form, qkv, (0, 1, 32), None, (None, None), np.arange(len(x)))
    return values[: len(x), 0]


def awkward(form: Format) -> Floats:
    """Every number of a 16-bit or shorter format, what lies halfway between neighbours, and a bit to either side."""
    size = 1 << (8 * TORCH[form].itemsize)
    codes = torch.arange(size).to(torch.uint8 if size == 256 else torch.uint16)
    exact = codes.view(TORCH[form]).float()
    finite = torch.from_numpy(np.unique(exact[exact.isfinite()].numpy()))
    halves = (finite[1:].double() + finite[:-1].double()).div(2).float()
    edges = torch.tensor(
        [0.0, -0.0, 447, 448, 464, 464.1, 479, 480, 500, 1e9, 65519, 65520, 3e38, 1e-40, torch.inf, torch.nan]
    )
    points = torch.cat((exact, halves, edges, -edges))
    several = torch.cat((points, points.nextafter(torch.tensor(torch.inf)), points.nextafter(torch.tensor(-torch.inf))))
    return several[: len(several) // 32 * 32].view(-1, 32).numpy()


@pytest.mark.parametrize("form", [Format.F16, Format.BF16, Format.KV_FP8_E4M3], ids=lambda form: form.name)
def test_conversions_are_those_of_torch(team: Team, form: Format) -> None:
    for x in (awkward(form), (np.random.default_rng(0).standard_normal((500, 32)) * 100).astype(np.float32)):
        got, expected = numbers(form, converted(team, form, x)), numbers(form, store(form, x))
        if form is Format.BF16:
            expected[(np.abs(x) < 2.0**-126) & (got == 0)] = 0  # the processor's conversion knows no denormals
        same = (got == expected) & ((np.signbit(got) == np.signbit(expected)) | (form is Format.BF16)) | (
            np.isnan(got) & np.isnan(expected)
        )
        assert same.all(), [
            (float(x[~same][n]), float(got[~same][n]), float(expected[~same][n]))
            for n in range(min(4, int((~same).sum())))
        ]


def test_int8_has_a_scale_for_each_token_and_head(team: Team) -> None:
    x = (
        np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)
        * np.logspace(-20, 20, 64, dtype=np.float32)[:, None]
    )
    x[5] = 0
    stored = converted(team, Format.KV_I8, x)
    assert (stored == store(Format.KV_I8, x)).all()
    assert (numbers(Format.KV_I8, stored)[5] == 0).all()
    x[6, 7], x[7, 31], x[8, 0] = np.nan, np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        spoiled = numbers(Format.KV_I8, converted(team, Format.KV_I8, x))
    assert (~np.isfinite(spoiled[6:9])).all(), "what is not finite stays visible"
    assert np.isfinite(spoiled[9:]).all()


def test_many_tokens(team: Team) -> None:
    """Several chunks on several threads give what single tokens give."""
    rng = np.random.default_rng(0)
    qkv = rng.standard_normal((300, 15 * 64)).astype(np.float32)
    angle = rng.uniform(0, 6, (300, 32)).astype(np.float32)
    tables, slots = (np.cos(angle), np.sin(angle)), rng.permutation(300)
    q, keys, values = write(team, Format.BF16, qkv, (9, 3, 64), tables, (None, None), slots)
    for n in range(0, 300, 23):
        own = tables[0][n : n + 1], tables[1][n : n + 1]
        one = write(team, Format.BF16, qkv[n : n + 1], (9, 3, 64), own, (None, None), slots[n : n + 1])
        assert (
            (one[0] == q[n]).all()
            and (one[1][slots[n]] == keys[slots[n]]).all()
            and (one[2][slots[n]] == values[slots[n]]).all()
        )


@pytest.mark.parametrize(
    ("heads", "rotary", "form", "words"),
    [
        ((2, 1, 12), 8, Format.F32, "multiple of 8"),
        ((2, 1, 16), 18, Format.F32, "rotary width"),
        ((2, 0, 16), 16, Format.F32, "heads"),
        ((2, 1, 16), 16, Format.Q4_0, "format"),
    ],
)
def test_what_cannot_be_run_is_refused(
    team: Team, heads: tuple[int, int, int], rotary: int, form: Format, words: str
) -> None:
    x, cache = np.zeros((1, 96), dtype=np.float32), np.zeros(4096, dtype=np.uint8)
    constants = {"i": [*heads, rotary, form], "p": [cache, cache]}
    with pytest.raises(NativeError, match=words):
        run_op(team, Op.ROPE_WRITE, 1, [x, x, x], ([0, 1, 2], []), constants, {"slots": np.zeros(1, dtype=np.int64)})
