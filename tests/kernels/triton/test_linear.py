"""The products in Triton: against their references at odd sizes, in place, beside poison, and alike at every batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from samovar.kernels import overlap
from samovar.kernels.linear import tiles
from samovar.kernels.linear import triton as products
from samovar.kernels.linear.tiles import DotTile, GemvTile, choose_tile, dot_tile, fixed_tile, gemv_tile
from samovar.kernels.op import OPS, Kernels, Op, Target, compare, load_ops
from samovar.kernels.triton_launch import SHARED_BYTES, noting

NAMES = ("linear", "linear_add", "norm_linear", "norm_gated_linear", "logits")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = {"llama-8b": (4096, 6144, 4096, 14336, 128256), "qwen3-0.6b": (1024, 4096, 2048, 3072, 151936)}
load_ops("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("impl", ["triton", "triton_fixed"])
@pytest.mark.parametrize("name", NAMES)
def test_each_op_matches_its_reference(name: str, impl: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.make_examples is not None
    for example in op.make_examples():
        assert compare(op, op.impls[impl].function, example, dtype, "cpu") is None


def normed(x: torch.Tensor, gain: torch.Tensor, eps: float) -> torch.Tensor:
    """The RMS norm of every row."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gain


def products_of(tokens: int, k: int, n: int) -> Iterator[tuple[torch.Tensor, dict[str, Any], torch.Tensor]]:
    """(weight, keywords of `multiply`, float64 result) for everything that may stand around a product."""
    x, g = torch.randn(tokens, k, dtype=torch.float64), torch.rand(k, dtype=torch.float64)
    weight, bias = torch.randn(2 * n, k, dtype=torch.float64) / k**0.5, torch.randn(2 * n, dtype=torch.float64)
    residual = torch.randn(tokens, n, dtype=torch.float64)
    x, g, weight, bias, residual = (a.half().double() for a in (x, g, weight, bias, residual))
    yield x, {"weight": weight[:n]}, x @ weight[:n].t()
    y = x @ weight[:n].t() + bias[:n] + residual
    yield x, {"weight": weight[:n], "bias": bias[:n], "residual": residual}, y
    z = normed(x, g, 0.1)
    y = torch.nn.functional.silu(z @ weight[:n].t() + bias[:n]) * (z @ weight[n:].t() + bias[n:])
    yield x, {"weight": weight, "bias": bias, "norm": (g, 0.1), "gate": "silu"}, y
    y = torch.nn.functional.gelu(x @ weight[:n].t(), approximate="tanh") * (x @ weight[n:].t()) + residual
    yield x, {"weight": weight, "gate": "gelu", "residual": residual}, y


def to(value: Any, dtype: torch.dtype) -> Any:
    """Tensors, also inside tuples, in `dtype`."""
    if isinstance(value, tuple):
        return tuple(to(each, dtype) for each in value)
    return value.to(dtype) if isinstance(value, torch.Tensor) else value


TILES = [
    (1, GemvTile(4, 64)),
    (1, GemvTile(1, 256)),
    (1, GemvTile(8, 32)),
    (3, DotTile(16, 32, 64)),
    (19, DotTile(16, 16, 64)),
    (33, DotTile(32, 64, 32)),
    (70, DotTile(64, 32, 16)),
    (21, DotTile(32, 64, 64, ahead=512)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("tokens", "tile"), TILES, ids=str)
@pytest.mark.parametrize(("k", "n"), [(144, 37), (64, 16), (129, 5)])
def test_every_tile_computes_everything_around_a_product(
    k: int, n: int, tokens: int, tile: GemvTile | DotTile, dtype: torch.dtype
) -> None:
    for x, keywords, expected in products_of(tokens, k, n):
        guarded = torch.full((tokens + 2, n), float("nan"), dtype=dtype)
        out = guarded[1:-1]
        if "norm" in keywords and isinstance(tile, DotTile):
            x, keywords = normed(x, *keywords["norm"]), {a: b for a, b in keywords.items() if a != "norm"}
        given = {name: to(value, dtype) for name, value in keywords.items()}
        if "residual" in given:
            out.copy_(given["residual"])
            given["residual"] = out
        assert products.multiply(tile, to(x, dtype), given.pop("weight"), out, **given) is out
        bound = 2e-5 if dtype is torch.float32 else 8e-3
        torch.testing.assert_close(out.double(), expected, atol=bound, rtol=bound)
        assert bool(guarded[[0, -1]].isnan().all()), "wrote beyond its result"


@pytest.mark.parametrize("splits", [2, 3, 4])
def test_split_sums_are_added_in_order(splits: int) -> None:
    tokens, k, n = 5, 176, 37
    for x, keywords, expected in products_of(tokens, k, n):
        if "gate" in keywords:
            continue
        out = torch.full((tokens, n), float("nan"))
        given = {name: to(value, torch.float32) for name, value in keywords.items()}
        if "residual" in given:
            out.copy_(given["residual"])
            given["residual"] = out
        tile = DotTile(16, 32, 32, splits=splits)
        again = given["residual"].clone() if "residual" in given else None
        products.multiply(tile, x.float(), given["weight"], out, **{a: b for a, b in given.items() if a != "weight"})
        torch.testing.assert_close(out.double(), expected, atol=2e-5, rtol=2e-5)
        if again is not None:
            given["residual"] = again
            other = replace(tile, tokens=32)
            products.multiply(
                other, x.float(), given["weight"], again, **{a: b for a, b in given.items() if a != "weight"}
            )
            assert torch.equal(out, again)


def test_what_the_tiled_kernel_cannot_do_is_refused() -> None:
    x, weight, gain, out = torch.randn(2, 64), torch.randn(64, 64), torch.ones(64), torch.empty(2, 64)
    with pytest.raises(ValueError, match="only a GemvTile norms its input"):
        products.multiply(DotTile(16, 32, 32), x, weight, out, norm=(gain, 1e-6))
    with pytest.raises(ValueError, match="cannot be split, but the tile has 2 splits"):
        products.multiply(DotTile(16, 32, 32, splits=2), x, weight, out[:, :32].contiguous(), gate="silu")


def call(name: str, function: Callable[..., Any], rows: slice, tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """What `function` gives for some rows of one and the same input."""
    x, weight, gain, residual = (
        tensors["x"][rows],
        tensors["weight"],
        tensors["gain"],
        tensors["residual"][rows].clone(),
    )
    match name:
        case "linear" | "logits":
            return function(x, weight)  # type: ignore[no-any-return]
        case "linear_add":
            function(x, weight, residual)
            return residual
        case "norm_linear":
            return function(x, gain, 1e-6, weight)  # type: ignore[no-any-return]
    return function(x, gain, 1e-6, weight, "silu")  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
def test_fixed_results_do_not_depend_on_the_batch(name: str) -> None:
    k, n = 160, 150
    tensors = {
        "x": torch.randn(200, k).bfloat16(),
        "weight": (torch.randn(n, k) / k**0.5).bfloat16(),
        "gain": torch.rand(k).bfloat16(),
        "residual": torch.randn(200, n).bfloat16(),
    }
    function = OPS[name].impls["triton_fixed"].function
    whole = call(name, function, slice(0, 200), tensors)
    for first, tokens in ((0, 1), (3, 7), (100, 64), (199, 1)):
        rows = slice(first, first + tokens)
        assert torch.equal(call(name, function, rows, tensors), whole[rows])


def test_fixed_is_for_deterministic_mode_and_only_it_is() -> None:
    for name in NAMES:
        for deterministic in (False, True):
            target = Target("cuda", "sm_90", torch.bfloat16, deterministic)
            assert (OPS[name].impls["triton"].refusal(target) is None) is not deterministic
            assert (OPS[name].impls["triton_fixed"].refusal(target) is None) is deterministic
    assert OPS["linear"].impls["triton"].refusal(Target("cpu", "", torch.bfloat16)) == "needs cuda"


def test_kernels_that_ask_for_weights_ahead_overlap_where_the_chip_can() -> None:
    weight, x = torch.empty(64, 64, device="meta"), torch.empty(2, 64, device="meta")
    for architecture, overlaps in (("sm_80", False), ("sm_90", True), ("sm_120", True), ("sm_86", False)):
        Kernels(Target("cuda", architecture, torch.float32), "cpu")
        with noting() as notes:
            products.linear_triton(x[:1], weight)
            products.multiply(DotTile(16, 32, 32, splits=2, ahead=512), x, weight, x.new_empty(2, 64))
            products.multiply(DotTile(16, 32, 32), x, weight, x.new_empty(2, 64))
        gemv, dot, plain = notes.launches.values()
        assert [gemv.name, dot.name, plain.name] == ["gemv_kernel", "dot_kernel", "dot_kernel"]
        for noted in (gemv, dot):
            assert noted.options["OVERLAP"] is overlaps and ("launch_pdl" in noted.options) is overlaps
        assert plain.options["OVERLAP"] is False and "launch_pdl" not in plain.options
    overlap.switch(False)


def test_without_matrix_instructions_cublas_multiplies() -> None:
    tokens = tiles.MOST_TOKENS[1]
    weight, x = torch.empty(64, 64, device="meta").half(), torch.empty(tokens, 64, device="meta").half()
    for architecture, multiplies in (("sm_70", False), ("sm_80", True)):
        products.accepts(Target("cuda", architecture, torch.float16))
        with noting() as notes:
            assert products.linear_triton(x, weight).shape == (tokens, 64)
            products.linear_triton(x[:1], weight)
        names = {noted.name for noted in notes.launches.values()}
        assert "gemv_kernel" in names and ("dot_kernel" in names) is multiplies


@pytest.mark.parametrize("name", NAMES)
def test_shapes_without_memory_and_no_tokens(name: str) -> None:
    op: Op[..., Any] = OPS[name]
    assert op.make_examples is not None
    for tokens in (0, 1, 5, 64, 300):
        tensors = {
            "x": torch.empty(tokens, 64, device="meta", dtype=torch.bfloat16),
            "weight": torch.empty(32, 64, device="meta", dtype=torch.bfloat16),
            "gain": torch.empty(64, device="meta", dtype=torch.bfloat16),
            "residual": torch.empty(tokens, 32, device="meta", dtype=torch.bfloat16),
        }
        for impl in ("triton", "triton_fixed"):
            with noting():
                y = call(name, op.impls[impl].function, slice(0, tokens), tensors)
            assert y.shape == (tokens, 16 if name == "norm_gated_linear" else 32)
            assert y.dtype is (torch.float32 if name == "logits" else torch.bfloat16)


def test_a_weight_that_is_not_contiguous_is_refused() -> None:
    with pytest.raises(ValueError, match=r"strides \(1, 8\): make it contiguous"):
        products.linear_triton(torch.randn(1, 4), torch.randn(4, 8).t())


def test_tiles_fill_the_chip_and_fit_into_it() -> None:
    """On Hopper, for which they were measured, every choice fits; chips with less memory leave to cuBLAS what does not."""
    for h, qkv, o, f, v in SHAPES.values():
        for n, k, parts in ((qkv, h, 1), (h, o, 1), (f, h, 2), (h, f, 1), (v, h, 1)):
            gemv = gemv_tile(n, k, parts)
            assert n / gemv.rows >= min(n, 4 * tiles.FEW_PROGRAMS) and gemv.rows * parts * gemv.columns <= 8192
            for tokens in range(2, tiles.MOST_TOKENS[parts] + 1):
                dot, small = (dot_tile(tokens, n, k, parts, is_large=is_large) for is_large in (True, False))
                assert tokens <= dot.tokens and dot.shared_bytes(parts, 2) <= SHARED_BYTES[90], dot
                for shared in SHARED_BYTES.values():
                    chosen = choose_tile(tokens, n, k, parts, 2, shared)
                    assert chosen is None or (chosen in (dot, small) and chosen.shared_bytes(parts, 2) <= shared)
                    assert chosen is None or -(-n // chosen.rows) * chosen.splits >= tiles.FEW_PROGRAMS // 2
    # Deterministic mode has no other choice. Volta and Turing copy to shared memory without stages.
    for parts, size in ((1, 2), (2, 2), (1, 4), (2, 4)):
        staged = [room for number, room in SHARED_BYTES.items() if number >= 80]
        assert fixed_tile(size, parts).shared_bytes(parts, size) <= min(staged)


def test_small_chips_have_tiles_too() -> None:
    """What is left to cuBLAS for want of memory is some of the products, not all."""
    for number in (86, 89, 120, 121):
        chosen = {
            (k, parts): choose_tile(tiles.MOST_TOKENS[parts], 14336, k, parts, 2, SHARED_BYTES[number])
            for k in (4096, 14336)
            for parts in (1, 2)
        }
        assert isinstance(chosen[4096, 1], DotTile) and isinstance(chosen[14336, 1], DotTile), number
        assert isinstance(choose_tile(4, 4096, 14336, 1, 2, SHARED_BYTES[number]), DotTile), number
    assert choose_tile(32, 14336, 4096, 1, 2, SHARED_BYTES[75]) is None
    assert isinstance(choose_tile(1, 14336, 4096, 1, 2, SHARED_BYTES[75]), GemvTile)


def test_the_number_of_tokens_chooses_the_kernel() -> None:
    room = SHARED_BYTES[90]
    assert isinstance(choose_tile(1, 4096, 4096, 1, 2, room), GemvTile)
    most = tiles.MOST_TOKENS[1]
    assert choose_tile(0, 4096, 4096, 1, 2, room) is None
    assert isinstance(choose_tile(2, 4096, 4096, 1, 2, room), DotTile)
    assert isinstance(choose_tile(most, 4096, 4096, 1, 2, room), DotTile)
    assert choose_tile(most + 1, 4096, 4096, 1, 2, room) is None
    assert choose_tile(most, 4096, 4096, 1, 4, room) is None and choose_tile(most, 4096, 4100, 1, 2, room) is None
    assert isinstance(choose_tile(1, 4096, 4100, 1, 4, room), GemvTile)
