"""The kernels that write codes, in the interpreter where there is no GPU, against the reference."""

from __future__ import annotations

import pytest
import torch

from samovar.kernels.rope_write_kv import rope_write_kv
from samovar.kernels.write_kv import write_kv
from samovar.kernels.write_kv.rows import rows_at
from tests.attention_triton.test_coded_caches import DEVICE, KINDS, SPECS, coded_cache

pytest.importorskip("triton", reason="Triton is not installed")

from samovar.kernels.rope_write_kv.triton import rope_write_kv_triton
from samovar.kernels.write_kv.triton import write_kv_triton


def compare(kind: str, written: list[tuple[torch.Tensor, ...]], slots: torch.Tensor, dim: int) -> None:
    """Codes may differ where rounding is a near thing: by one step, in few places. What was skipped is as it was."""
    blocks, offsets = slots // 16, slots % 16
    for which in range(2):
        expected, got = (rows_at(cache, which, blocks, offsets, dim) for cache in written)
        step = 0.3 if "e5m2" in kind else 0.15
        assert float(((got - expected).abs() > 1e-6 * expected.abs()).float().mean()) < 0.01
        torch.testing.assert_close(got, expected, rtol=step, atol=step * float(expected.abs().max()))
    untouched = torch.ones(written[0][0].shape[:2], dtype=torch.bool, device=DEVICE)
    untouched[blocks, offsets] = False
    for expected, got in zip(*(cache[:2] for cache in written), strict=True):
        assert torch.equal(expected.view(torch.uint8)[untouched], got.view(torch.uint8)[untouched])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_write(kind: str, dtype: torch.dtype) -> None:
    """Skipped rows, rows of zeros, numbers beyond the largest, and heads that are no power of two."""
    torch.manual_seed(0)
    for heads, dim in ((3, 24), (2, 128)):
        k, v = torch.randn((2, 12, heads, dim), device=DEVICE).to(dtype)
        k[2], v[4] = 0, 0
        k[5] *= 200
        slots = torch.randperm(48, device=DEVICE)[:12]
        given = slots.clone()
        given[3] = -1
        written = [coded_cache(kind, heads, dim, (3, 16)) for _ in range(2)]
        for write, cache in zip((write_kv, write_kv_triton), written, strict=True):
            write(k, v, *cache[:2], given, *cache[2:])
        compare(kind, written, slots[given >= 0], dim)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "packed" not in SPECS[kind.split()[0]][1]])
@pytest.mark.parametrize("normed", [False, True])
def test_rope_and_write(kind: str, normed: bool) -> None:
    """Whole and partial rotations; the queries are those of the plain kernel."""
    torch.manual_seed(0)
    for dim, rotary in ((32, 32), (24, 8)):
        qkv = torch.randn((7, 4 + 2 + 2, dim), device=DEVICE)
        angle = torch.rand((7, 1, rotary // 2), device=DEVICE) * 6
        tables = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
        slots = torch.randperm(48, device=DEVICE)[:7]
        given = slots.clone()
        given[3] = -1
        weights = [torch.rand(dim, device=DEVICE) + 0.5 if normed else None for _ in "qk"]
        written, queries = [coded_cache(kind, 2, dim, (3, 16)) for _ in range(2)], []
        for run, cache in zip((rope_write_kv, rope_write_kv_triton), written, strict=True):
            queries.append(run(qkv, *tables, *cache[:2], given, *weights, 1e-6, 4, *cache[2:]))
        torch.testing.assert_close(*queries, rtol=4e-6, atol=4e-6)
        compare(kind, written, slots[given >= 0], dim)
