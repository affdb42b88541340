"""Every format split over two ranks, by outputs and by inputs: each rank's weight is its part of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from samovar.errors import CheckpointError
from samovar.layers import ColumnLinear, Linear, QKVLinear, RowLinear
from samovar.parallel.mesh import Axis
from samovar.quant.select import select
from samovar.quant.stored import Stored
from tests.models.paged_run import placement
from tests.quant.filling import fill
from tests.quant.test_checkpoints import as_tensor
from tests.quant.writers import BY_NAME, Writer

IN = 128
NOT_BY_OUTPUTS = ("ct-fp8-block", "bnb-nf4")
NOT_BY_INPUTS = ("ct-fp8-block", "bnb-nf4", "bnb-fp4", "gptq-4-order")
"""What cannot be split, or not at these sizes."""


def stored(writer: Writer, parts: dict[str, int]) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Tensors of `{part}`, and the weights they mean."""
    rng = np.random.default_rng(5)
    tensors: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, rows in parts.items():
        written, weight = writer.linear(name, rng.standard_normal((rows, IN)) * 0.1)
        tensors |= {f"{name}.{key}": as_tensor(value) for key, value in written.items()}
        meant[name] = torch.from_numpy(np.ascontiguousarray(weight)).float()
    return tensors, meant


def weight_of(layer: Linear, path: str, writer: Writer, tensors: dict[str, torch.Tensor], axis: Axis) -> torch.Tensor:
    """This rank's weight. Skipped linears have another path here."""
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    layer.path = path
    layer.bind(placement(tp=axis, quant_for=select(writer.config, torch.float32, placement().kernels, shapes=shapes)))
    fill(layer, tensors)
    assert isinstance(layer.quant, Stored)
    weight = layer.quant.dequantize(layer.weights)
    x = torch.randn(2, weight.shape[1])
    if writer.inputs is None:
        assert torch.allclose(layer.project(x), x @ weight.t(), atol=1e-4)
    return weight


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in NOT_BY_OUTPUTS])
def test_outputs(name: str) -> None:
    """Gate and up, half of each."""
    parts = {"m.gate_proj": 64, "m.up_proj": 64}
    tensors, meant = stored(BY_NAME[name], parts)
    for rank in range(2):
        layer = ColumnLinear(IN, {"gate_proj": 64, "up_proj": 64})
        found = weight_of(layer, "m.gate_up_proj", BY_NAME[name], tensors, Axis(rank, 2))
        expected = torch.cat([meant[part][rank * 32 : rank * 32 + 32] for part in parts])
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in NOT_BY_OUTPUTS])
def test_heads_with_copies(name: str) -> None:
    """Four ranks and two key/value heads: two ranks read the same rows of k and v."""
    parts = {"a.q_proj": 128, "a.k_proj": 64, "a.v_proj": 64}
    tensors, meant = stored(BY_NAME[name], parts)
    for rank in range(4):
        found = weight_of(QKVLinear(IN, 4, 2, 32), "a.qkv_proj", BY_NAME[name], tensors, Axis(rank, 4))
        kv = slice(rank // 2 * 32, rank // 2 * 32 + 32)
        expected = torch.cat(
            [meant["a.q_proj"][rank * 32 : rank * 32 + 32], meant["a.k_proj"][kv], meant["a.v_proj"][kv]]
        )
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in NOT_BY_INPUTS])
def test_inputs(name: str) -> None:
    tensors, meant = stored(BY_NAME[name], {"m.down_proj": 64})
    for rank in range(2):
        found = weight_of(RowLinear(IN, 64), "m.down_proj", BY_NAME[name], tensors, Axis(rank, 2))
        assert torch.allclose(found, meant["m.down_proj"][:, rank * 64 : rank * 64 + 64], rtol=1e-6, atol=1e-7)


def test_act_order_cannot_be_split_over_inputs() -> None:
    tensors, _ = stored(BY_NAME["gptq-4-order"], {"m.down_proj": 64})
    with pytest.raises(CheckpointError, match=r"m\.down_proj\.g_idx names group .* --tensor-parallel-size 1"):
        weight_of(RowLinear(IN, 64), "m.down_proj", BY_NAME["gptq-4-order"], tensors, Axis(0, 2))


@pytest.mark.parametrize(("name", "layer"), [("bnb-nf4", ColumnLinear(IN, 64)), ("bnb-fp4", RowLinear(IN, 64))])
def test_blocks_that_run_over_rows_cannot_be_split(name: str, layer: Linear) -> None:
    """What a rank would hold is not what the checkpoint has, and the plan says so."""
    tensors, _ = stored(BY_NAME[name], {"l": 64})
    with pytest.raises(AssertionError, match=r"l\.weight"):
        weight_of(layer, "l", BY_NAME[name], tensors, Axis(0, 2))


def test_groups_that_a_rank_would_cut() -> None:
    """64 of 128 inputs are no whole number of groups of 128."""
    writer = BY_NAME["awq"]
    whole = Writer("awq", writer.config | {"group_size": 128}, writer.linear)
    layer = RowLinear(IN, 64)
    layer.path = "m.down_proj"
    with pytest.raises(CheckpointError, match=r"m\.down_proj\.qzeros .* 128 input features.*--tensor-parallel-size"):
        layer.bind(placement(tp=Axis(0, 2), quant_for=select(whole.config, torch.float32, placement().kernels)))


def test_a_bias_and_a_fused_checkpoint_tensor(tmp_path: Path) -> None:
    """Biases stay apart; q, k and v that the checkpoint holds as one tensor have one scale."""
    for name in ("modelopt-fp8", "gptq-3", "ct-nvfp4"):
        tensors, meant = stored(BY_NAME[name], {"a.qkv_proj": 128})
        tensors["a.qkv_proj.bias"] = torch.randn(128)
        layer = QKVLinear(IN, 4, 2, 16, bias=True, stored_fused=True)
        layer.path = "a.qkv_proj"
        shapes = {key: tuple(value.shape) for key, value in tensors.items()}
        layer.bind(placement(quant_for=select(BY_NAME[name].config, torch.float32, placement().kernels, shapes=shapes)))
        fill(layer, tensors)
        assert isinstance(layer.quant, Stored)
        weight = layer.quant.dequantize(layer.weights)
        assert torch.allclose(weight, meant["a.qkv_proj"], rtol=1e-6, atol=1e-7)
        x = torch.randn(3, IN) * 0.1
        rounds = BY_NAME[name].inputs
        rounded = x if rounds is None else torch.from_numpy(rounds(x.numpy()))
        assert torch.allclose(layer.project(x), rounded @ weight.t() + tensors["a.qkv_proj.bias"], atol=1e-5)
