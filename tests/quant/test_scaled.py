"""FP8 and int8 linears as a GPU multiplies them, in the interpreter, beside the same linears dequantized."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from samovar.kernels import overlap
from samovar.kernels.op import Kernels, Target
from samovar.kernels.quantize_rows import quantize_rows
from samovar.kernels.scaled_linear import tiles
from samovar.quant.base import QuantMethod
from samovar.quant.fp8 import FP8Scheme
from samovar.quant.inputs import Inputs
from samovar.quant.online import Online
from samovar.quant.rounded import Rounded
from samovar.quant.scaled import fits
from samovar.quant.scheme import Layer, Scheme
from samovar.quant.whole_int import IntScheme

pytest.importorskip("triton", reason="Triton is not installed")

ROWS, INPUTS = [128, 128], 256
SCHEMES: dict[str, Scheme] = {
    "fp8 dynamic": FP8Scheme("column", inputs=Inputs("fp8")),
    "fp8 static": FP8Scheme("tensor", inputs=Inputs("fp8", "tensor", is_dynamic=False)),
    "fp8 blocks": FP8Scheme("block", (128, 128), inputs=Inputs("fp8", "group", group_size=128)),
    "int8 dynamic": IntScheme("column", inputs=Inputs("int8")),
    "int8 static": IntScheme("tensor", inputs=Inputs("int8", "tensor", is_dynamic=False)),
}


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Kernels]]:
    """Those of a GPU, for tensors of the host, and those of the host. Few programs: they run one after the other."""
    torch.manual_seed(0)
    monkeypatch.setattr(tiles, "PROGRAMS", 2)
    tiles.choose_tile.cache_clear()
    made = {name: Kernels(Target(name, "sm_90", torch.float32), "cpu") for name in ("cuda", "cpu")}
    overlap.switch(False)
    yield made
    tiles.choose_tile.cache_clear()


def filled(
    scheme: Scheme, kernels: Kernels, input_scales: tuple[float, float]
) -> tuple[Rounded, dict[str, torch.Tensor]]:
    """A layer of two parts; the same numbers for every caller."""
    method = scheme.method(Layer(("gate", "up"), kernels))
    assert isinstance(method, Rounded)
    weights = method.allocate(method.tensors, {"out": 256, "in": INPUTS, "part": 2}, ROWS, torch.empty)
    made = torch.Generator().manual_seed(1)
    for name, tensor in weights.items():
        if "input" in name:
            tensor.copy_(torch.tensor(input_scales))
        elif "scale" in name:
            tensor.copy_(0.001 + torch.rand(tensor.shape, generator=made) / 100)
        else:
            plain = torch.randn(tensor.shape, generator=made)
            codes, _ = quantize_rows(plain, "int8" if tensor.dtype is torch.int8 else "fp8")
            tensor.view(codes.dtype).copy_(codes)
    return method, method.after_load(weights, ROWS)


@pytest.mark.parametrize(
    ("name", "input_scales"),
    [
        ("fp8 dynamic", (0.02, 0.02)),
        ("int8 static", (0.02, 0.03)),
        *(pytest.param(name, (0.02, 0.02), marks=pytest.mark.slow) for name in list(SCHEMES)[1:]),
    ],
)
def test_products_are_those_of_dequantized_weights(
    name: str, input_scales: tuple[float, float], kernels: dict[str, Kernels]
) -> None:
    """Float32 throughout, so that both sides differ by the order of sums; see `norm_scaled_linear` for norms."""
    fast, held = filled(SCHEMES[name], kernels["cuda"], input_scales)
    plain, kept = filled(SCHEMES[name], kernels["cpu"], input_scales)
    assert fast.products is not None and plain.products is None
    bias, gain = torch.randn(256), torch.rand(INPUTS)
    for tokens in (1, 5):
        x, residual = torch.randn(tokens, INPUTS), torch.randn(tokens, 256)
        wanted = plain.multiply(x, kept, bias)
        scale = float(wanted.abs().max())
        assert torch.allclose(fast.multiply(x, held, bias), wanted, atol=1e-5 * scale)
        sums = residual.clone()
        fast.add_multiply(x, held, sums, bias)
        assert torch.allclose(sums, residual + wanted, atol=1e-5 * scale)
        for got, expected in (
            (fast.norm_multiply(x, gain, 1e-6, held, bias), plain.norm_multiply(x, gain, 1e-6, kept, bias)),
            (
                fast.norm_gated_multiply(x, gain, 1e-6, held, "silu", bias),
                plain.norm_gated_multiply(x, gain, 1e-6, kept, "silu", bias),
            ),
        ):
            assert float((got - expected).norm() / expected.norm()) < 1e-2


def test_weights_that_were_never_loaded_name_their_kernels(kernels: dict[str, Kernels]) -> None:
    for scheme in SCHEMES.values():
        method = scheme.method(Layer(("gate", "up"), kernels["cuda"]))

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(*shape, dtype=dtype, device="meta")

        weights = method.allocate(method.tensors, {"out": 256, "in": INPUTS, "part": 2}, ROWS, empty)
        assert isinstance(method, Rounded)
        found = method.small(weights)
        assert found is not None and found[0].shape == (256, INPUTS) and found[1].is_meta


@pytest.mark.parametrize("format", ["fp8", "int8"])
def test_plain_weights_become_rounded_ones_on_a_gpu(format: str, kernels: dict[str, Kernels]) -> None:
    weight, x = torch.randn(256, INPUTS) / 16, torch.randn(3, INPUTS)
    results = []
    for target in ("cuda", "cpu"):
        made = Online(format, torch.float32, kernels[target]).of_parts(["m.weight"])
        kept = made.allocate(made.tensors, {"out": 256, "in": INPUTS, "part": 1}, [256], torch.empty)
        kept["weight"].copy_(weight)
        results.append(made.multiply(x, made.after_load(kept, [256])))
        assert isinstance(made.loaded, Rounded) and (made.loaded.products is not None) == (target == "cuda")
    off = float((results[0] - results[1]).norm() / results[1].norm())
    # Rounding activations by the token: steps of a sixteenth at most in FP8, of a 127th of the largest in int8.
    assert 1e-3 < off < (0.04 if format == "fp8" else 0.015)


def test_which_activations_have_kernels() -> None:
    assert not fits(None, "fp8", None)
    assert not fits(Inputs("int8"), "fp8", None)
    assert not fits(Inputs("int8", is_symmetric=False), "int8", None)
    assert not fits(Inputs("fp8", "tensor"), "fp8", None)  # a scale that depends on what else is in the batch
    assert not fits(Inputs("fp8", "group", group_size=64), "fp8", (64, 64))
    assert fits(Inputs("fp8", "group", group_size=128), "fp8", (128, 128))


def test_on_other_devices_nothing_changes(kernels: dict[str, Kernels]) -> None:
    method = FP8Scheme("column").method(Layer(("m",), kernels["cuda"]))
    assert method.products is None and isinstance(method, QuantMethod)
