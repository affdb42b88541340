"""Rows as caches store them: codes, scales, places in memory; the reference that kernels are compared with."""

from __future__ import annotations

import pytest
import torch

from samovar.cache.kv_cache import KVCache
from samovar.core.cache_spec import KINDS, CacheSpec
from samovar.kernels.write_kv import write_kv
from samovar.kernels.write_kv.layout import layer_cache
from samovar.kernels.write_kv.rows import decode, encode, level, pack, rows_at, thresholds, unpack
from samovar.layers.rotation import rotations

ERRORS = {4: 0.0095, 3: 0.0346, 2: 0.1175}
"""Mean square errors of the best quantizers of normal numbers (Max 1960)."""


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_packing_is_exact(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (5, 3, 24), dtype=torch.uint8)
    packed = pack(codes, bits)
    assert packed.shape == (5, 3, 24 * bits // 8) and torch.equal(unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_levels_are_nearly_the_best(bits: int) -> None:
    x = torch.linspace(-6, 6, 200_001, dtype=torch.float64)
    weight = torch.exp(-x.square() / 2)
    index = torch.bucketize(x.abs(), thresholds(bits).double())
    error = (x - x.sign() * level(index + 0.5, bits)).square()
    assert float((error * weight).sum() / weight.sum()) == pytest.approx(ERRORS[bits], rel=6e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_packed_rows_err_as_theory_says_without_bias(bits: int) -> None:
    """Rows of any size; the part along the row is kept whole, so the error is that of the levels and no shrinking."""
    torch.manual_seed(0)
    rows = torch.randn(400, 2, 128) * torch.logspace(-2, 2, 400)[:, None, None]
    codes, scales = encode(rows, torch.empty(1, 1, 2, 16 * bits, dtype=torch.uint8), torch.empty(0))
    assert scales is not None
    got = decode(codes, scales, 128)
    square = rows.square().sum(-1)
    assert float(((got - rows).square().sum(-1) / square).mean()) == pytest.approx(
        ERRORS[bits] / (1 - ERRORS[bits]), rel=0.1
    )
    torch.testing.assert_close((got * rows).sum(-1), square, rtol=1e-4, atol=0)


@pytest.mark.parametrize("kind", ["int8", "fp8", "k8v4", "tq3.5", "tq2.5"])
@pytest.mark.parametrize("is_head_major", [False, True])
def test_written_rows_are_read_and_blocks_copied(kind: str, is_head_major: bool) -> None:
    """In either order of memory; rows of zeros are zeros; the error is that of 4 bits and less, or of half a step."""
    torch.manual_seed(1)
    spec = CacheSpec("full", 3, 24, 2).stored_as(kind)
    dtype = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}.get(kind, torch.uint8)
    cache = KVCache([spec], 5, 8, dtype, is_head_major=is_head_major)
    assert cache.nbytes == 5 * 8 * spec.bytes_per_token
    k, v = torch.randn(2, 16, 3, 24)
    k[3], v[5] = 0, 0
    keys, values, *scales = cache.layers[0]
    slots = torch.randperm(24)[:16]
    write_kv(k, v, keys, values, slots, *scales)
    cache.copy_blocks([(0, 3), (1, 4), (2, 0)])
    moved = torch.tensor([3, 4, 0])[slots // 8]
    for which, rows in enumerate((k, v)):
        got = rows_at(cache.layers[0], which, moved, slots % 8, 24)
        bits = spec.formats[which].bits
        error = float((got - rows).norm() / rows.norm())
        assert error < (0.03 if kind == "fp8" else 0.01 if bits == 8 else 1.4 * ERRORS[bits] ** 0.5)
        assert bool((got[(rows == 0).all(-1)] == 0).all())


def test_floats_saturate_and_nothing_else_hides() -> None:
    x = torch.tensor([[[1e6, -1e9, 3.0, torch.nan]]])
    for dtype, most in ((torch.float8_e4m3fn, 448.0), (torch.float8_e5m2, 57344.0)):
        like = torch.empty(0, dtype=dtype)
        codes, _ = encode(x, like, None)
        assert decode(codes, None, 4)[0, 0].tolist()[:3] == [most, -most, 3.0] and bool(codes.float().isnan()[0, 0, 3])
        scales = torch.tensor([1e5])
        assert decode(encode(x, like, scales)[0], scales, 4)[0, 0, 0] == pytest.approx(1e6, rel=0.13)
    codes, scale = encode(x, torch.empty(0, dtype=torch.int8), None)
    assert bool(decode(codes, scale, 4).isnan().all())


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rotations_keep_products(dim: int, dtype: torch.dtype) -> None:
    """Exactly: entries are powers of two. And one large channel is spread over its block."""
    stored, met = rotations(dim, dtype, torch.device("cpu"))
    assert torch.equal(stored.double() @ met.double().T, torch.eye(dim, dtype=torch.float64))
    row = torch.zeros(dim, dtype=dtype)
    row[5] = 1
    turned = (row @ stored).double()
    assert int((turned != 0).sum()) == dim & -dim and len(turned.abs().unique()) <= 2


def test_sizes_fall_with_bits() -> None:
    """Bytes of a token of one head of 128, keys and values."""
    spec = CacheSpec("full", 1, 128, 2)
    sizes = {kind: spec.stored_as(kind).bytes_per_token for kind in KINDS}
    assert sizes == {"16 bits": 512, "fp8": 256, "int8": 264, "k8v4": 198, "tq3.5": 116, "tq2.5": 84}


def test_scales_are_aligned() -> None:
    """Kernels read rows and scales in as large pieces as they can."""
    for kind in ("int8", "k8v4", "tq3.5", "tq2.5"):
        for dim, size in ((64, 8), (80, 16), (128, 32)):
            _, tensors = layer_cache(CacheSpec("full", 2, dim, 2).stored_as(kind), (3, size), torch.int8, "cpu", True)
            assert all(tensor.data_ptr() % 16 == 0 for tensor in tensors), (kind, dim)
