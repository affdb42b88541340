"""The self-test of a start: right kernels pass, wrong ones are left out, said, and refused where that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from samovar.errors import ConfigError
from samovar.kernels.coded_linear import tiles
from samovar.kernels.op import Kernels, Target
from samovar.layers import Placement, bind
from samovar.layers.linear import QKVLinear
from samovar.layers.mlp import GatedMLP
from samovar.native import library
from samovar.native.team import make_team
from samovar.quant.base import QuantMethod
from samovar.quant.formats import PLAIN
from samovar.quant.online import Online
from samovar.quant.packed import Packed
from samovar.quant.products import Products
from samovar.quant.select import select
from samovar.weights.load import fill_dummy
from samovar.worker.native_support import weight_notes
from samovar.worker.self_test import SelfTest, checks_of

pytest.importorskip("triton", reason="Triton is not installed")
from samovar.kernels.coded_linear import triton as coded

DIM, HIDDEN = 128, 64


class Block(nn.Module):
    """A layer's linears in the order of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = QKVLinear(DIM, 2, 1, 16)
        self.mlp = GatedMLP(DIM, HIDDEN)


def filled(format: str) -> tuple[nn.Module, Kernels]:
    """Two equal layers of a format, with a GPU's kernels in Triton's interpreter."""
    kernels = Kernels(Target("cuda", "sm_90", torch.bfloat16), "cpu")
    model = nn.Sequential(Block(), Block())
    refill(model, kernels, format)
    return model, kernels


def refill(model: nn.Module, kernels: Kernels, format: str) -> None:
    def quant_for(path: str) -> QuantMethod:
        return Online(format, torch.bfloat16, kernels)

    bind(model, Placement(dtype=torch.bfloat16, device=torch.device("cpu"), kernels=kernels, quant_for=quant_for))
    fill_dummy(model, 0)


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samovar.worker.self_test.TOKENS", (1, 33))
    monkeypatch.setattr(tiles, "_refused", set())
    tiles.choose_tile.cache_clear()


@pytest.mark.parametrize("format", ["nvfp4", "int4", "mxfp4"])
def test_right_kernels_pass(format: str) -> None:
    model, kernels = filled(format)
    assert [(check.op, check.num_rows, check.num_inputs) for check in checks_of(model)] == [
        ("coded_linear", 64, 128),
        ("coded_gated_linear", 64, 128),
        ("coded_linear_add", 128, 64),
    ]
    test = SelfTest()
    assert not test.refuses(model, kernels) and not test.lines


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_rounded_products_pass(format: str) -> None:
    model, kernels = filled(format)
    found = [check.op for check in checks_of(model)]
    assert found == ["norm_scaled_linear", "norm_gated_scaled_linear", "scaled_linear_add"]
    test = SelfTest()
    assert not test.refuses(model, kernels) and not test.lines


def broken(multiply: Callable[..., torch.Tensor], least: int) -> Callable[..., torch.Tensor]:
    """A kernel that forgets a few inputs when it has `least` tokens or more."""

    def wrong(tile: object, x: torch.Tensor, *weight: object, **options: object) -> torch.Tensor:
        if len(x) >= least:
            x = x.clone()
            x[:, :16] = 0
        return multiply(tile, x, *weight, **options)

    return wrong


def test_a_tile_that_is_wrong_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only for its numbers of tokens; the decoded product takes its place, and it is said."""
    model, kernels = filled("nvfp4")
    monkeypatch.setattr(coded, "multiply", broken(coded.multiply, 33))
    test = SelfTest()
    assert not test.refuses(model, kernels)
    assert len(test.lines) == 2  # residuals have a kernel of their own, which is right here
    assert "coded_linear of e2m1_16 [64, 128] is decoded first at 33 tokens, for its kernel is wrong" in test.lines[0]
    assert tiles.choose_tile(33, 64, 128, 1, 1 << 20) is None and tiles.choose_tile(32, 64, 128, 1, 1 << 20) is not None
    assert not SelfTest().refuses(model, kernels)
    assert kernels.routes["coded_linear"].chosen == "triton"


def test_a_kernel_that_is_always_wrong_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op is chosen anew; what is bound after that is decoded by torch."""
    model, kernels = filled("nvfp4")
    monkeypatch.setattr(coded, "multiply", broken(coded.multiply, 0))
    monkeypatch.setattr(coded, "multiply_decoded", broken(lambda _, x, *rest: torch.zeros(len(x), 64), 0))
    test = SelfTest()
    assert test.refuses(model, kernels)
    assert any("coded_linear is not done by triton" in line for line in test.lines)
    assert kernels.routes["coded_linear"].chosen == "reference"
    refill(model, kernels, "nvfp4")
    assert not list(checks_of(model)) and not test.refuses(model, kernels)
    assert any("no kernel" in note for note in weight_notes(model))


def test_a_kernel_that_does_not_run_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kernels = filled("fp8")

    def fails(*given: object) -> torch.Tensor:
        raise RuntimeError("out of registers")

    monkeypatch.setattr("samovar.kernels.scaled_linear_add.triton.scaled_product", fails)
    test = SelfTest()
    assert test.refuses(model, kernels)
    assert "does not run: RuntimeError: out of registers" in test.lines[0]


@pytest.fixture
def blocks() -> Iterator[tuple[nn.Module, Kernels]]:
    """A layer of Q4_0 blocks in the CPU library."""
    try:
        library.load()
    except library.NativeError as error:
        pytest.skip(str(error))
    team, kernels = make_team(1), Kernels(Target("cpu", "", torch.float32), "cpu")
    plain = Packed(PLAIN[torch.bfloat16], Products(lambda: team), kernels)
    quant_for = select(None, torch.bfloat16, kernels, plain=plain, online="int4")
    model = Block()
    bind(model, Placement(dtype=torch.float32, device=torch.device("cpu"), kernels=kernels, quant_for=quant_for))
    fill_dummy(model, 0)
    yield model, kernels
    team.close()


def test_the_library_of_a_cpu_is_tested(blocks: tuple[nn.Module, Kernels], monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a library multiplies wrongly are an error: there is nothing to take its place."""
    model, kernels = blocks
    assert {check.what for check in checks_of(model)} == {"Q4_0"}
    assert not SelfTest().refuses(model, kernels)
    right = Products.linear

    def wrong(self: Products, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        return right(self, x, *rest) * 1.2

    monkeypatch.setattr(Products, "linear", wrong)
    with pytest.raises(ConfigError, match="Q4_0 .* is wrong on this machine at 1 tokens"):
        SelfTest().refuses(model, kernels)
