"""Products in several blocks of rows, in other dtypes, of no rows, and of sizes that fill no word."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samovar.layers import ColumnLinear
from samovar.quant import decoded
from samovar.quant.inputs import round_inputs
from samovar.quant.rounded import Rounded
from samovar.quant.select import select
from samovar.quant.stored import Stored
from tests.models.paged_run import placement
from tests.quant.filling import fill
from tests.quant.test_checkpoints import as_tensor
from tests.quant.writers import BY_NAME, INT4, Writer, compressed, packed_int


def made(
    writer: Writer, parts: dict[str, int], inputs: int, *, bias: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[ColumnLinear, torch.Tensor]:
    """A layer with random weights, and the weight that they mean."""
    rng = np.random.default_rng(inputs)
    tensors: dict[str, torch.Tensor] = {}
    meant: list[torch.Tensor] = []
    for name, rows in parts.items():
        written, weight = writer.linear(name, rng.standard_normal((rows, inputs)) * 0.1)
        tensors |= {f"m.{name}.{key}": as_tensor(value) for key, value in written.items()}
        meant.append(torch.from_numpy(np.ascontiguousarray(weight)).float())
        if bias:
            tensors[f"m.{name}.bias"] = torch.randn(rows)
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    layer = ColumnLinear(inputs, parts, bias=bias)
    layer.path = "m.joined"
    place = placement(dtype)
    layer.bind(placement(dtype, quant_for=select(writer.config, dtype, place.kernels, shapes=shapes)))
    fill(layer, tensors)
    return layer, torch.cat(meant)


@pytest.mark.parametrize("name", BY_NAME)
def test_several_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 rows a block, over parts of 320 and 192: borders of parts and blocks fall apart."""
    monkeypatch.setattr(decoded, "BLOCK_WEIGHTS", 1)
    layer, meant = made(BY_NAME[name], {"gate_proj": 320, "up_proj": 192}, 128, bias=True)
    assert isinstance(layer.quant, Stored)
    assert [count for _, _, count in layer.quant.blocks()] == [128, 128, 64, 128, 64]
    assert torch.allclose(layer.quant.dequantize(layer.weights), meant, rtol=1e-6, atol=1e-7)
    x = torch.randn(3, 128)
    rounds = BY_NAME[name].inputs
    given_x = x if rounds is None else torch.from_numpy(rounds(x.numpy()))
    assert torch.allclose(layer(x), given_x @ meant.t() + layer.weights["bias"], atol=1e-4)


@pytest.mark.parametrize("name", BY_NAME)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    """The weight is rounded to the activations' type once, and nothing else is; no rows are no error."""
    layer, meant = made(BY_NAME[name], {"gate_proj": 64, "up_proj": 32}, 128, dtype=dtype)
    x = torch.randn(4, 128, dtype=dtype)
    assert isinstance(layer.quant, Stored)
    given_x = x
    if isinstance(layer.quant, Rounded) and layer.quant.inputs is not None:
        scale = layer.weights.get(layer.quant.input_name)
        given_x = round_inputs(x, layer.quant.inputs, None if scale is None else scale[0])
    found = layer(x)
    assert found.dtype == dtype and torch.equal(found, torch.nn.functional.linear(given_x, meant.to(dtype)))
    assert layer(x[:0]).shape == (0, 96)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6), st.sampled_from([2, 3, 4, 8]))
def test_packed_zero_points_of_any_number_of_rows(first: int, second: int, groups: int, bits: int) -> None:
    """Zero points are packed along rows, and every part begins a word of its own."""
    weights = {**INT4, "num_bits": bits, "symmetric": False}
    writer = Writer("ragged", compressed("pack-quantized", weights), packed_int(bits, 32, symmetric=False))
    if bits == 3:  # the last word of a stream may be missing where others would be whole
        first, second = 32 * first, 32 * second
    layer, meant = made(writer, {"gate_proj": first, "up_proj": second}, 32 * groups)
    assert isinstance(layer.quant, Stored)
    assert torch.allclose(layer.quant.dequantize(layer.weights), meant, rtol=1e-6, atol=1e-7)


@settings(max_examples=40)
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 100))
def test_ragged_blocks_of_any_size(first: int, second: int, inputs: int) -> None:
    """B157: blocks that are cut off at the ends of both axes, in each of two parts."""
    layer, meant = made(BY_NAME["ct-fp8-block"], {"gate_proj": first, "up_proj": second}, inputs)
    assert isinstance(layer.quant, Stored)
    assert torch.allclose(layer.quant.dequantize(layer.weights), meant, rtol=1e-6, atol=1e-7)


@settings(max_examples=25)
@given(st.integers(1, 24), st.integers(1, 5))
def test_four_bit_blocks_over_rows(rows: int, quarters: int) -> None:
    """bitsandbytes: 64 weights of a block may end in the middle of a row."""
    inputs = 16 * quarters
    rows *= 4
    layer, meant = made(BY_NAME["bnb-nf4"], {"gate_proj": rows, "up_proj": 4}, inputs)
    assert isinstance(layer.quant, Stored)
    assert torch.allclose(layer.quant.dequantize(layer.weights), meant, rtol=1e-6, atol=1e-7)


def test_each_part_rounds_by_its_own_static_scale() -> None:
    """Parts of a fused layer that were calibrated apart: x is rounded for each of them anew."""
    layer, meant = made(BY_NAME["modelopt-fp8"], {"gate_proj": 32, "up_proj": 16}, 64)
    assert isinstance(layer.quant, Rounded) and layer.quant.inputs is not None
    layer.weights["input_scale"].copy_(torch.tensor([0.05, 0.001]))
    x = torch.randn(3, 64)
    parts = [round_inputs(x, layer.quant.inputs, torch.tensor(scale)) for scale in (0.05, 0.001)]
    expected = torch.cat([given_x @ rows.t() for given_x, rows in zip(parts, meant.split([32, 16]), strict=True)], 1)
    assert torch.allclose(layer(x), expected, atol=1e-4) and not torch.allclose(*parts)
