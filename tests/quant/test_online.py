"""Quantization at load time: close to the plain weight, exact where the format can be, and small in memory."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.errors import ConfigError
from samovar.layers import ColumnLinear, Linear, RowLinear, bind
from samovar.models.registry import build
from samovar.quant.inputs import Inputs, round_inputs
from samovar.quant.numbers import encode
from samovar.quant.numbers.small_floats import decode_e2m1, decode_ue8m0
from samovar.quant.online import Online
from samovar.quant.online_formats import FORMATS
from samovar.quant.select import select
from samovar.quant.unquantized import Unquantized
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import load_weights
from tests.models.paged_run import PagedRun, placement
from tests.quant.filling import fill
from tests.quant.test_checkpoints import PROMPT, plain, write
from tests.quant.writers import BY_NAME

__all__ = ["plain"]

OFF = {"fp8": 0.03, "int8": 0.009, "int4": 0.09, "nvfp4": 0.1, "mxfp4": 0.13}
"""Relative error of normal weights: half a step of each format over a range of about four deviations, and a margin."""
BITS = {"fp8": 8.2, "int8": 8.2, "int4": 4.5, "nvfp4": 4.7, "mxfp4": 4.25}


def made(name: str, weight: torch.Tensor, parts: dict[str, int]) -> Linear:
    layer = ColumnLinear(weight.shape[1], parts)
    layer.path = "m.gate_up_proj"
    layer.bind(placement(quant_for=select(None, torch.float32, placement().kernels, online=name)))
    tensors, first = {}, 0
    for part, rows in parts.items():
        tensors[f"m.{part}.weight"] = weight[first : first + rows]
        first += rows
    planned = layer.resident_bytes()
    fill(layer, tensors)
    held = sum(tensor.nbytes for tensor in layer.weights.values())
    assert held <= planned <= held + 8 * len(weight) * (1 + weight.shape[1] // 32)
    return layer


def meaning(layer: Linear) -> torch.Tensor:
    assert isinstance(layer.quant, Online) and layer.quant.inner is not None
    return layer.quant.inner.dequantize(layer.weights)


@pytest.mark.parametrize("name", FORMATS)
def test_error_and_size(name: str) -> None:
    weight = torch.randn(192, 256, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[128:] *= 50  # the second part has a range of its own
    layer = made(name, weight, {"gate_proj": 128, "up_proj": 64})
    found = meaning(layer)
    for rows in (slice(0, 128), slice(128, 192)):
        assert float((found[rows] - weight[rows]).norm() / weight[rows].norm()) < OFF[name]
    assert sum(tensor.nbytes for tensor in layer.weights.values()) * 8 / weight.numel() <= BITS[name]
    x = torch.randn(5, 256)
    assert torch.allclose(layer(x), x @ found.t(), atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros_and_extremes_stay_finite(name: str) -> None:
    weight = torch.zeros(32, 64)
    weight[1] = 1e-30
    weight[2] = 3e4
    weight[3, 5] = -1.0
    found = meaning(made(name, weight, {"gate_proj": 32}))
    assert found.isfinite().all() and torch.equal(found[0], weight[0]) and not found[4:].any()
    assert float(found[2, 0]) == pytest.approx(3e4, rel=0.15)
    assert torch.equal(found[3, :5], weight[3, :5]) and float(found[3, 5]) == pytest.approx(-1, rel=0.1)


@pytest.mark.parametrize("name", FORMATS)
def test_what_the_format_holds_is_held_exactly(name: str) -> None:
    """Weights that lie on the format's own grid come back as they were; quantizing twice changes nothing."""
    weight = meaning(made(name, torch.randn(32, 64, generator=torch.Generator().manual_seed(3)), {"gate_proj": 32}))
    again = meaning(made(name, weight, {"gate_proj": 32}))
    assert torch.allclose(again, weight, rtol=2**-10 if name == "int4" else 1e-6, atol=0)


def test_the_better_of_two_scales() -> None:
    """NVFP4: where four is the better end than six. MXFP4: where the next power of two is. Both against brute force."""
    weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
    codes, scale = encode.mxfp4_groups(weight, 32)
    chosen = (decode_e2m1(codes) * decode_ue8m0(scale) - weight).square().sum(1)
    for power in range(110, 135):
        factor = decode_ue8m0(torch.tensor([power], dtype=torch.uint8))
        other = (decode_e2m1(encode.encode_e2m1(weight / factor)) * factor - weight).square().sum(1)
        assert bool((chosen <= other + 1e-6).all())
    whole = encode.nvfp4_scale(weight)
    codes, scale = encode.nvfp4_groups(weight, whole, 16)
    found = decode_e2m1(codes) * (scale.float() * whole).repeat_interleave(16, 1)
    six = encode.encode_ue4m3(weight.view(64, 2, 16).abs().amax(-1) / 6 / whole).float() * whole
    plain_error = (
        decode_e2m1(encode.encode_e2m1(weight / six.repeat_interleave(16, 1))) * six.repeat_interleave(16, 1) - weight
    )
    assert float((found - weight).norm()) < 0.97 * float(plain_error.norm())


def test_groups_that_do_not_come_out_even() -> None:
    for name, width in (("int4", 80), ("nvfp4", 72), ("mxfp4", 48)):
        layer = RowLinear(width, 32)
        layer.path = "m.down_proj"
        with pytest.raises(ConfigError, match=f"--quantization {name}: m.down_proj.weight has {width} inputs"):
            layer.bind(placement(quant_for=select(None, torch.float32, placement().kernels, online=name)))


def test_names_that_do_not_exist() -> None:
    with pytest.raises(ConfigError, match="--quantization int3 is not one of fp8, int8, int4, nvfp4, mxfp4"):
        select(None, torch.float32, placement().kernels, online="int3")


@pytest.mark.parametrize("name", FORMATS)
def test_a_model(name: str, plain: Path) -> None:
    """Logits stay near the plain model's; embedding and head stay plain."""
    description = describe(plain, ModelConfig())
    found = []
    for online in (None, name):
        model = build(description.architecture, description.config)
        bind(model, placement(quant_for=select(None, torch.float32, placement().kernels, online=online)))
        with open_checkpoint(description) as checkpoint:
            load_weights(model, checkpoint)
        assert isinstance(model.lm_head.quant, Unquantized) and isinstance(model.model.embed_tokens.quant, Unquantized)
        run = PagedRun(model, TorchSdpaAttention())
        found.append(run.step([(run.stream(len(PROMPT)), PROMPT)])[0])
    error = float((found[1] - found[0]).norm() / found[0].norm())
    assert 0 < error < 8 * OFF[name]


def test_only_what_a_checkpoint_left_plain(plain: Path, tmp_path: Path) -> None:
    """A checkpoint with plain attention in its first layer: that becomes int8, the rest stays as it is."""
    write(BY_NAME["mxfp4"], plain, tmp_path)
    description = describe(tmp_path, ModelConfig())
    model = build(description.architecture, description.config)
    stored = description.config["quantization_config"]
    bind(model, placement(quant_for=select(stored, torch.float32, placement().kernels, online="int8")))
    with open_checkpoint(description) as checkpoint:
        load_weights(model, checkpoint)
    kinds = {path: type(layer.quant).__name__ for path, layer in model.named_modules() if isinstance(layer, Linear)}
    assert kinds["model.layers.0.self_attn.qkv_proj"] == kinds["model.layers.0.self_attn.o_proj"] == "Online"
    assert set(kinds.values()) == {"Online", "MXFP4"} and list(kinds.values()).count("Online") == 2


# --- activations


def test_tokens_are_rounded_by_their_own_scale() -> None:
    x = torch.tensor([[1.0, -127.0, 63.5, 0.0], [0.0, 0.0, 0.0, 0.0], [1e-3, 2e-3, -2.54e-1, 1e-5]])
    found = round_inputs(x, Inputs("int8"))
    assert torch.allclose(found[0], torch.tensor([1.0, -127.0, 64.0, 0.0])) and not found[1].any()
    assert torch.allclose(found[2], torch.tensor([0.0, 2e-3, -2.54e-1, 0.0]), atol=1e-6)


def test_rounding_with_a_zero_point() -> None:
    """A token between 0 and 255 is held exactly by 256 steps; one that is negative throughout keeps its zero."""
    x = torch.stack((torch.arange(256.0), -torch.arange(256.0)))
    found = round_inputs(x, Inputs("int8", is_symmetric=False))
    assert torch.allclose(found, x, atol=1e-4)
    static = round_inputs(
        torch.tensor([[300.0, 0.4, -1.0]]),
        Inputs("int8", "tensor", False, False),
        torch.tensor(1.0),
        torch.tensor(-128.0),
    )
    assert static.tolist() == [[255.0, 0.0, 0.0]]


def test_static_scales_saturate_and_dynamic_ones_do_not() -> None:
    x = torch.tensor([[1000.0, 1.0]])
    static = Inputs("fp8", "tensor", is_dynamic=False)
    assert round_inputs(x, static, torch.tensor([1.0])).tolist() == [[448.0, 1.0]]
    assert float(round_inputs(x, Inputs("fp8", "tensor"))[0, 0]) == pytest.approx(1000)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_groups_of_features(dtype: torch.dtype) -> None:
    """Each 128 features have a scale of their own: a large one leaves the others alone; no token is no error."""
    x = torch.full((2, 256), 0.01, dtype=dtype)
    x[:, 200] = 400.0
    found = round_inputs(x, Inputs("fp8", "group", group_size=128))
    assert found.dtype == dtype and torch.allclose(found[:, :128], x[:, :128], rtol=1e-2)
    assert math.isclose(float(found[0, 200]), 400.0, rel_tol=0.01)
    for strategy in ("tensor", "token"):
        assert round_inputs(x[:0], Inputs("int8", strategy)).shape == (0, 256)  # type: ignore[arg-type]
