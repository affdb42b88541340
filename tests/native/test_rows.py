"""Operations on rows against float64: norms, sums, gates, gathering, scaling, rope tables; and ARGMAX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from samovar.native.abi import Count, Op
from samovar.native.library import NativeError
from samovar.native.team import Team
from tests.native.single_op import ISAS, padded, run_op

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
EPSILON = 2.0**-24
WIDTHS = [1, 3, 15, 16, 17, 48, 64, 100, 576, 2048]
ROWS = [0, 1, 2, 37]


@pytest.fixture(scope="module", params=ISAS)
def team(request: pytest.FixtureRequest) -> Iterator[Team]:
    with Team(2, request.param) as team:
        yield team


def normals(rng: np.random.Generator, *shape: int) -> Floats:
    return rng.standard_normal(shape).astype(np.float32)


def norm(x: Floats, w: Floats, eps: float) -> Doubles:
    wide: Doubles = x.astype(np.float64)
    result: Doubles = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * w
    return result


def close(got: Floats, expected: Doubles, roundings: float, floor: float | Doubles = 0.0) -> None:
    """Within so many float32 roundings of the result, or of `floor`."""
    assert got.shape == expected.shape
    bound = roundings * EPSILON * (np.abs(expected) + floor) + 1e-37
    far = np.abs(got - expected) / bound
    assert (far <= 1).all(), f"off by {np.nanmax(far):.3g} bounds"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_rms_norm(team: Team, width: int, rows: int) -> None:
    rng = np.random.default_rng(width)
    x, w = normals(rng, rows, width) * 3, normals(rng, width)
    y = np.zeros_like(x)
    run_op(team, Op.RMS_NORM, rows, [padded(x, rng), y], ([0], [1]), {"i": [width, 1], "f": [1e-5], "p": [w]})
    close(y, norm(x, w, 1e-5), 8 + width / 64)


@pytest.mark.parametrize("is_shared", [True, False])
def test_norms_of_segments(team: Team, is_shared: bool) -> None:
    rng = np.random.default_rng(0)
    x, w = normals(rng, 9, 5 * 24), normals(rng, 24 if is_shared else 5 * 24)
    y = np.zeros_like(x)
    run_op(team, Op.RMS_NORM, 9, [x, y], ([0], [1]), {"i": [24, 5, int(is_shared)], "f": [1e-6], "p": [w]})
    close(y.reshape(9, 5, 24), norm(x.reshape(9, 5, 24), w.reshape(-1, 24), 1e-6), 12)
    run_op(team, Op.RMS_NORM, 9, [x], ([0], [0]), {"i": [24, 5, int(is_shared)], "f": [1e-6], "p": [w]})
    assert (x == y).all(), "in place it is the same"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("rows", ROWS)
def test_sums_and_their_norms(team: Team, width: int, rows: int) -> None:
    rng = np.random.default_rng(width)
    a, b, w = normals(rng, rows, width), normals(rng, rows, width), normals(rng, width)
    y, normed = np.zeros_like(a), np.zeros_like(a)
    wide_a, wide_b = padded(a, rng), padded(b, rng)
    run_op(team, Op.ADD, rows, [wide_a, wide_b, y], ([0, 1], [2]), {"i": [width]})
    assert (y == a + b).all()
    run_op(
        team, Op.ADD_RMS_NORM, rows, [wide_a, wide_b, normed], ([0, 1], [0, 2]), {"i": [width], "f": [1e-5], "p": [w]}
    )
    assert (wide_a[:, :width] == y).all(), "the sum may be written over what is summed"
    close(normed, norm(y, w, 1e-5), 8 + width / 64)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize(("kind", "name"), [(0, "silu"), (1, "gelu_tanh"), (2, "gelu_erf")])
def test_gates(team: Team, width: int, kind: int, name: str) -> None:
    rng = np.random.default_rng(width)
    x = normals(rng, 11, 2 * width) * 4
    x[0, :width] = np.resize(np.array([0, -0.0, 100, -100, 1e-30, -87.9, 88.9, 1e30, -1e30], dtype=np.float32), width)
    y = np.zeros((11, width), dtype=np.float32)
    run_op(team, Op.GATED, 11, [padded(x, rng), y], ([0], [1]), {"i": [width, 0, 0, 0, kind]})
    gate, up = (torch.from_numpy(part.astype(np.float64)) for part in (x[:, :width], x[:, width:]))
    f = torch.nn.functional
    expected = (f.silu(gate) if kind == 0 else f.gelu(gate, approximate="tanh" if kind == 1 else "none")) * up
    # exp and tanh are good to 2e-7; 1 + tanh and 1 + erf cancel where the gate is negative: an error of the gate itself.
    close(y, expected.numpy(), 24, 0.0 if kind == 0 else np.abs((gate * up).numpy()).astype(np.float64))


def test_a_row_is_gathered_wherever_it_is(team: Team) -> None:
    rng = np.random.default_rng(0)
    x, ids = normals(rng, 20, 70), rng.integers(0, 20, 31)
    y = np.zeros((31, 70), dtype=np.float32)
    run_op(
        team, Op.GATHER_ROWS, 31, [padded(x, rng), y], ([0], [1]), {"i": [70], "count": Count.ROWS}, {"row_ids": ids}
    )
    assert (y == x[ids]).all()


@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_scaling_and_caps(team: Team, cap: float) -> None:
    rng = np.random.default_rng(0)
    x = normals(rng, 7, 533) * 40
    y = np.zeros_like(x)
    run_op(team, Op.SCALE_CAP, 7, [x, y], ([0], [1]), {"i": [533], "f": [0.7, cap]})
    scaled = x.astype(np.float64) * np.float32(0.7)
    close(y, cap * np.tanh(scaled / cap) if cap else scaled, 16, cap)


def test_rope_tables(team: Team) -> None:
    """Of the very float32 angle, also after many turns."""
    rng = np.random.default_rng(0)
    positions = np.concatenate((np.arange(40), rng.integers(0, 1 << 20, 30)))
    per_position = (10000.0 ** -(np.arange(24) / 24)).astype(np.float32)
    cosines, sines = np.zeros((2, 70, 24), dtype=np.float32)
    constants: dict[str, Any] = {"i": [0, 0, 0, 48], "f": [1.25], "p": [per_position]}
    run_op(team, Op.ROPE_TABLE, 70, [cosines, sines], ([], [0, 1]), constants, {"positions": positions})
    angle = (positions[:, None].astype(np.float32) * per_position).astype(np.float64)
    close(cosines, np.cos(angle) * 1.25, 2, 1.0)
    close(sines, np.sin(angle) * 1.25, 2, 1.0)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("isa", ISAS)
def test_argmax(isa: str, threads: int) -> None:
    """The first of the largest, wherever the parts of a row end."""
    rng = np.random.default_rng(0)
    with Team(threads, isa) as team:
        for width in (1, 15, 16, 17, 1000, 8191, 49152):
            for rows in (1, 2, 33 if width < 10000 else 5):
                x = normals(rng, rows, width)
                x[::2] = np.round(x[::2])  # many equals
                assert (argmax(team, padded(x, rng), width) == x.argmax(axis=1)).all()


def argmax(team: Team, x: Floats, width: int) -> NDArray[np.int64]:
    ids = np.full(len(x), -7, dtype=np.int64)
    run_op(team, Op.ARGMAX, len(x), [x], ([0], []), {"i": [width], "count": Count.ROWS}, {"argmax_ids": ids})
    return ids


def test_argmax_of_what_is_not_finite(team: Team) -> None:
    width = 20000
    x = np.random.default_rng(0).standard_normal((8, width)).astype(np.float32)
    x[0, 19_999] = np.nan
    x[1, 4] = np.inf
    x[2, 7:] = -np.inf
    x[3] = -np.inf
    x[4] = np.nan
    x[5, 16_384] = np.nan
    x[6, 0] = -np.inf
    expected = [-1, -1, int(x[2].argmax()), -1, -1, -1, int(x[6].argmax()), int(x[7].argmax())]
    assert argmax(team, x, width).tolist() == expected


@pytest.mark.parametrize("seed", range(20))
def test_random_shapes(team: Team, seed: int) -> None:
    rng = np.random.default_rng(seed)
    width, rows = int(rng.integers(1, 700)), int(rng.integers(1, 90))
    x, w = normals(rng, rows, width) * np.float32(10.0 ** rng.integers(-3, 4)), normals(rng, width)
    y, total, normed = np.zeros((3, rows, width), dtype=np.float32)
    run_op(team, Op.RMS_NORM, rows, [padded(x, rng), y], ([0], [1]), {"i": [width, 1], "f": [1e-6], "p": [w]})
    close(y, norm(x, w, 1e-6), 8 + width / 64)
    run_op(team, Op.ADD_RMS_NORM, rows, [x, x, total, normed], ([0, 1], [2, 3]), {"i": [width], "f": [1e-6], "p": [w]})
    close(normed, norm(x * 2, w, 1e-6), 8 + width / 64)


def test_what_cannot_be_run_is_refused(team: Team) -> None:
    x = np.zeros((1, 4), dtype=np.float32)
    with pytest.raises(NativeError, match="width"):
        run_op(team, Op.ADD, 1, [x], ([0, 0], [0]), {"i": [0]})
    with pytest.raises(NativeError, match="weight"):
        run_op(team, Op.RMS_NORM, 1, [x], ([0], [0]), {"i": [4, 1]})
    with pytest.raises(NativeError, match="activation"):
        run_op(team, Op.GATED, 1, [x], ([0], [0]), {"i": [2, 0, 0, 0, 3]})
    with pytest.raises(NativeError, match="rotary width"):
        run_op(team, Op.ROPE_TABLE, 1, [x, x], ([], [0, 1]), {"i": [0, 0, 0, 3], "p": [x]})
    with pytest.raises(NativeError, match="argmax_ids"):
        run_op(team, Op.ARGMAX, 1, [x], ([0], []), {"i": [4]})
