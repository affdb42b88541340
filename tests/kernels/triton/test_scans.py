"""The scans in Triton: against their references, with every tile, across calls, and from projections whose rows lie apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from samovar.kernels.op import OPS, compare, load_ops
from samovar.kernels.state_space_scan import state_space_scan
from samovar.kernels.state_space_scan.tiles import CHUNKS, SINGLE, ScanTile, scan_tile
from samovar.kernels.state_space_scan.triton import scan_in
from samovar.kernels.triton_launch import SHARED_BYTES

load_ops("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NAMES = ("state_space_scan", "selective_scan")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_each_op_matches_its_reference(name: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.make_examples is not None
    for example in op.make_examples():
        assert compare(op, op.impls["triton"].function, example, dtype, DEVICE) is None


def example(counts: list[int], heads: int, dim: int, groups: int, n: int) -> list[Any]:
    """Arguments whose x, b, c and dt are parts of one projection, with a state among others that are NaN."""
    tokens, inner, shared = sum(counts), heads * dim, groups * n
    projected = torch.randn(tokens, inner + 2 * shared + heads + 5, device=DEVICE)
    x, b, c, dt, _ = torch.split(projected, [inner, shared, shared, heads, 5], dim=1)
    x, b, c = x.view(tokens, heads, dim), b.view(tokens, groups, n), c.view(tokens, groups, n)
    constants = (each.to(DEVICE) for each in (-3 * torch.rand(heads), torch.randn(heads), torch.randn(heads)))
    rows = torch.arange(len(counts), device=DEVICE).int() * 2 + 1
    state = torch.full((2 * len(counts) + 1, heads, dim, n), torch.nan, device=DEVICE)
    state[rows.long()] = torch.randn(len(counts), heads, dim, n, device=DEVICE)
    first_rows = torch.tensor([0, *counts], device=DEVICE).cumsum(0).int()
    return [x, dt, b, c, *constants, state, first_rows, rows, counts, all(count == 1 for count in counts)]


@pytest.mark.parametrize("tile", [ScanTile(16, 16, 4), ScanTile(32, 32, 4)], ids=str)
def test_tiles_of_any_size_compute_everything(tile: ScanTile) -> None:
    """Sizes that are multiples of nothing; sequences shorter and longer than a chunk; rows of others stay NaN."""
    given = example([1, 37, 16, 3], 4, 24, 2, 20)
    wanted = [each.clone() if isinstance(each, torch.Tensor) else each for each in given]
    expected = state_space_scan(*wanted)
    y = scan_in(tile, tuple(given[:8]), given[8], given[9], False)
    torch.testing.assert_close(y, expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(given[7], wanted[7], atol=2e-4, rtol=1e-4, equal_nan=True)
    assert bool(given[7][::2].isnan().all())


def test_single_tokens_compute_everything() -> None:
    given = example([1] * 3, 3, 40, 1, 33)
    wanted = [each.clone() if isinstance(each, torch.Tensor) else each for each in given]
    expected = state_space_scan(*wanted)
    y = scan_in(SINGLE, tuple(given[:8]), given[8], given[9], True)
    torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(given[7], wanted[7], atol=1e-5, rtol=1e-4, equal_nan=True)


def test_a_state_that_is_not_contiguous_is_refused() -> None:
    given = example([1], 2, 16, 1, 16)
    given[7] = given[7].transpose(1, 2)
    with pytest.raises(ValueError, match="make it contiguous"):
        OPS["state_space_scan"].impls["triton"].function(*given)


@pytest.mark.parametrize("capability", [80, 90, 120])
def test_tiles_fit(capability: int) -> None:
    """For the sizes in use, with one sequence and with many; a tile of more channels than a head has would be idle."""
    shared = SHARED_BYTES[capability]
    for heads, dim, n in ((128, 64, 128), (48, 64, 128), (24, 64, 256), (8, 16, 16), (3, 24, 20)):
        for sequences in (1, 16):
            for size in (2, 4):
                tile = scan_tile(sequences * heads, dim, n, size, shared)
                assert tile.shared_bytes(n, size) <= shared and tile in CHUNKS
                assert tile.columns < 2 * max(dim, 16)
