"""Scaled products in Triton: against their references, tile by tile, joined with what surrounds them, alike in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
import torch

from samovar.kernels.linear import tiles as plain_tiles
from samovar.kernels.op import OPS, Target, compare, load_ops
from samovar.kernels.quantize_rows import quantize_rows
from samovar.kernels.quantize_rows.triton import quantize
from samovar.kernels.rms_norm import rms_norm
from samovar.kernels.scaled_linear import dequantized, rounded_inputs, tiles, weight_of
from samovar.kernels.scaled_linear import triton as products
from samovar.kernels.scaled_linear.tiles import DotTile, GemvTile, choose_tile, dot_tile, fitted, fixed_tile, gemv_tile
from samovar.kernels.scaled_linear.torch_wide import scaled_linear_wide
from samovar.kernels.scaled_linear.triton import Given, fixed_product, multiply, scaled_product
from samovar.kernels.silu_mul import silu_mul
from samovar.kernels.triton_launch import SHARED_BYTES

NAMES = ("scaled_linear", "scaled_linear_add", "norm_scaled_linear", "norm_gated_scaled_linear")
SHAPES = {"qkv": (6144, 4096, 1), "o": (4096, 4096, 1), "gate_up": (14336, 4096, 2), "down": (4096, 14336, 1)}
load_ops("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each program of the GEMV takes many rows: the interpreter runs one program after the other."""
    monkeypatch.setattr(tiles, "PROGRAMS", 6)
    choose_tile.cache_clear()
    yield
    choose_tile.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activations_are_rounded_exactly(dtype: torch.dtype) -> None:
    op = OPS["quantize_rows"]
    assert op.make_examples is not None
    for example in op.make_examples():
        assert compare(op, op.impls["triton"].function, example, dtype, "cpu") is None


@pytest.mark.parametrize("impl", ["triton", "triton_fixed"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.usefixtures("few_programs")
def test_each_op_matches_its_reference(name: str, impl: str) -> None:
    op = OPS[name]
    assert op.make_examples is not None
    for example in op.make_examples():
        assert compare(op, op.impls[impl].function, example, torch.bfloat16, "cpu") is None


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "impl"), list(product(NAMES, ["triton", "triton_fixed"])))
@pytest.mark.usefixtures("few_programs")
def test_each_op_matches_its_reference_in_other_dtypes(name: str, impl: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.make_examples is not None
    for example in op.make_examples():
        assert compare(op, op.impls[impl].function, example, dtype, "cpu") is None


def expected_of(x: torch.Tensor, given: Given) -> torch.Tensor:
    """float32 results of the same rounded numbers."""
    y = rounded_inputs(x, given.weight, given.scale, given.input_scale) @ dequantized(given.weight, given.scale).t()
    if given.bias is not None:
        y += given.bias
    y = y if given.gate is None else silu_mul(y)
    return y if given.residual is None else y + given.residual


TILES = [
    (1, GemvTile(1, 7), {}),
    (1, GemvTile(4, 3, 8), {"residual": True, "bias": True}),
    (1, GemvTile(2, 9), {"gate": "silu", "bias": True}),
    (3, DotTile(16, 64), {"residual": True}),
    (5, DotTile(16, 32, 128, splits=3), {"residual": True, "bias": True}),
    (19, DotTile(16, 64, 128, ahead=256), {"gate": "silu", "bias": True}),
]


@pytest.mark.parametrize(("tokens", "tile", "around"), TILES, ids=lambda value: str(value))
@pytest.mark.parametrize("kind", ["fp8", "int8", "blocks"])
def test_every_tile_computes_the_same(kind: str, tokens: int, tile: GemvTile | DotTile, around: dict[str, str]) -> None:
    """Rows and inputs that no tile divides; sums in float32 differ by their order alone."""
    n, k = (128 if "gate" in around else 136), (384 if kind == "blocks" else 336)
    rows = 2 * n if "gate" in around else n
    given = Given(
        *weight_of(rows, k, kind),
        bias=torch.randn(rows) if "bias" in around else None,
        residual=torch.randn(tokens, n) if "residual" in around else None,
        gate=around.get("gate"),
    )
    x = torch.randn(tokens, k)
    wanted = expected_of(x, given)
    assert torch.allclose(multiply(x, given, tile), wanted, atol=2e-5, rtol=1e-5)


def test_norms_are_rounded_alike_in_one_kernel_and_two() -> None:
    """Both round the norm to the activations' dtype first, as the reference does. (The interpreter cuts bfloat16 off.)"""
    x, gain = 3 * torch.randn(1, 384, dtype=torch.float16), torch.rand(384, dtype=torch.float16)
    for kind in ("fp8", "int8", "blocks"):
        given = Given(*weight_of(24, 384, kind), norm=(gain, 1e-6))
        wanted = expected_of(rms_norm(x, gain, 1e-6), given)
        for tile in (GemvTile(2, 5), DotTile(16, 32)):
            got = multiply(x, given, tile).float()
            assert torch.allclose(got, wanted, atol=1e-3, rtol=2**-11)  # one rounding of the result


def test_gated_activations_are_rounded_with_what_follows() -> None:
    gate_up = torch.randn(3, 512)
    codes, scales = quantize(gate_up, "int8", group=128, gate="silu")
    wanted, wanted_scales = quantize_rows(silu_mul(gate_up), "int8", 128)
    assert torch.allclose(scales, wanted_scales, rtol=1e-6)
    assert int((codes.int() - wanted.int()).abs().max()) <= 1  # a last digit of the activation may cross a half


def test_rows_are_alike_at_every_batch_size_where_that_is_asked_for() -> None:
    x = torch.randn(70, 256, dtype=torch.bfloat16)
    for kind in ("fp8", "int8", "blocks"):
        given = Given(*weight_of(40, 256, kind))
        whole = fixed_product(x, given)
        for rows in (slice(0, 1), slice(3, 8)):
            assert torch.equal(fixed_product(x[rows], given), whole[rows])


def test_static_scales_saturate() -> None:
    x = torch.tensor([[1e4, -1e4, 0.3, 0.0] * 32])
    for kind in ("fp8", "int8"):
        given = Given(*weight_of(16, 128, kind), input_scale=torch.tensor([0.01]))
        for tile in (GemvTile(1, 16), DotTile(16, 32)):
            assert torch.allclose(multiply(x, given, tile), expected_of(x, given), atol=1e-4, rtol=1e-5)


def test_zeros_give_zeros() -> None:
    for kind, tile in product(("fp8", "int8", "blocks"), (GemvTile(1, 16), DotTile(16, 32))):
        given = Given(*weight_of(16, 128, kind))
        assert not multiply(torch.zeros(1, 128), given, tile).any()


def test_chips_without_fp8_compute_the_same() -> None:
    x = torch.randn(5, 256)
    for kind in ("fp8", "int8", "blocks"):
        given = Given(*weight_of(136, 256, kind), bias=torch.randn(136))
        assert torch.allclose(scaled_linear_wide(x, *weight_and_bias(given)), expected_of(x, given), atol=2e-5)
    for architecture in ("sm_70", "sm_80", "sm_86"):
        refusal = products.accepts(Target("cuda", architecture, torch.bfloat16))
        assert refusal is not None and architecture in refusal and "16 bits" in refusal


def weight_and_bias(given: Given) -> tuple[torch.Tensor | None, ...]:
    return given.weight, given.scale, given.input_scale, given.bias


def test_what_does_not_fit_is_refused() -> None:
    x, given = torch.randn(3, 256), Given(*weight_of(64, 256, "fp8"))
    with pytest.raises(ValueError, match="strides"):
        multiply(x, replace(given, weight=given.weight[:, ::2]), DotTile(16, 32))
    with pytest.raises(ValueError, match="cannot be split"):
        multiply(x, replace(given, gate="silu"), DotTile(16, 32, splits=2))
    with pytest.raises(ValueError, match="blocks of 128"):
        multiply(x, Given(*weight_of(200, 256, "blocks"), gate="silu"), DotTile(16, 32))


def test_torch_multiplies_many_tokens_where_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[torch.Size, ...]] = []

    def scaled_mm(a: torch.Tensor, b: torch.Tensor, **options: torch.Tensor) -> torch.Tensor:
        scales = options["scale_a"], options["scale_b"]
        asked.append((a.shape, b.shape, *(scale.shape for scale in scales)))
        assert b.stride(0) == 1 and all(scale.dtype is torch.float32 for scale in scales)
        return ((a.float() * scales[0]) @ (b.float() * scales[1])).bfloat16()

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(products, "_has_product", True)
    x, gain = torch.randn(130, 128, dtype=torch.bfloat16), torch.ones(128, dtype=torch.bfloat16)
    residual = torch.randn(130, 32, dtype=torch.bfloat16)
    given = Given(*weight_of(32, 128, "fp8"), residual=residual.clone())
    wanted = expected_of(x, given)
    assert torch.allclose(scaled_product(x, given).float(), wanted, atol=3e-2, rtol=2**-7)
    assert asked == [((130, 128), (128, 32), (130, 1), (1, 32))]
    gated = Given(*weight_of(64, 128, "fp8"), gate="silu", norm=(gain, 1e-6))
    assert torch.allclose(
        scaled_product(x, gated).float(), expected_of(rms_norm(x, gain, 1e-6), gated), atol=0.1, rtol=3e-2
    )
    assert len(asked) == 2


@pytest.mark.parametrize("name", SHAPES)
def test_tiles_of_a_model_fit(name: str) -> None:
    """Every choice runs on chips with little shared memory, fills an H200, and shares no more results than counters."""
    n, k, parts = SHAPES[name]
    for architecture, tokens in product((89, 90, 120), (1, 2, 8, 16, 33, 64, 100, 128, 300, 8192)):
        shared = SHARED_BYTES[architecture]
        tile = choose_tile(tokens, n, k, parts, shared, has_product=architecture == 90)
        if tile is None:
            assert architecture == 90 and tokens > 32
        elif isinstance(tile, GemvTile):
            assert tokens == 1 and tile.programs * tile.rows <= n + tile.programs
        else:
            assert tile.shared_bytes(parts) <= shared and tile.tokens & (tile.tokens - 1) == 0
            tiles = -(-tokens // tile.tokens) * -(-n // tile.rows)
            assert tile.splits == 1 or (parts == 1 and tiles <= products.MOST_JOINED)
            assert tile.depth == 128 and tile.rows <= 128  # a block of scales holds for a whole tile


def test_tiles_shrink_to_what_there_is() -> None:
    tile = dot_tile(128, 4096, 4096)
    assert fitted(tile, 1, SHARED_BYTES[120]).stages < tile.stages
    assert fitted(fixed_tile(2), 2, SHARED_BYTES[120]).shared_bytes(2) <= SHARED_BYTES[120]
    assert gemv_tile(48, 64).programs <= 48 and plain_tiles.power_of_two(14336) == 1 << 14
