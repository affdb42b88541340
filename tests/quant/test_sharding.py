"""Every format split over two ranks, by outputs and by inputs: each rank's weight is its part of the whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError, ConfigError
from samovar.layers import ColumnLinear, Linear, QKVLinear, RowLinear, bind
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build
from samovar.parallel.mesh import Axis
from samovar.quant.select import select
from samovar.quant.stored import Stored
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import load_weights
from tests.models.paged_run import placement
from tests.quant.filling import fill
from tests.quant.test_checkpoints import as_tensor, plain, write
from tests.quant.writers import BY_NAME, Writer

__all__ = ["plain"]

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


# --- whole models on two ranks, by the plan of the loader

REFUSED = {
    "ct-fp8-block": r"weight_scale has one entry for every 48 output features, and 32 of them on each device cut one",
    "bnb-nf4": r"qkv_proj|q_proj\.weight",
    "bnb-fp4": r"o_proj\.weight",
    "gptq-3": r"qzeros has one entry for every 32 output features, which do not divide 16 of them here",
    "gptq-4-order": r"(o|down)_proj\.g_idx names group .*--tensor-parallel-size 1",
}
"""Formats of which a rank's share would cut what has one scale, and what is said then."""


def rank_of_model(folder: Path, writer: Writer, rank: int, size: int) -> DecoderLM:
    description = describe(folder, ModelConfig())
    model = build(description.architecture, description.config)
    with open_checkpoint(description) as checkpoint:
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        quant_for = select(writer.config, torch.float32, placement().kernels, shapes=shapes)
        bind(model, placement(tp=Axis(rank, size), quant_for=quant_for))
        load_weights(model, checkpoint)
    return model


def weights_by_path(model: DecoderLM) -> dict[str, tuple[Linear, torch.Tensor]]:
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, Linear):
            stored = isinstance(layer.quant, Stored)
            found[path] = layer, layer.quant.dequantize(layer.weights) if stored else layer.weights["weight"]  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in REFUSED])
def test_a_whole_model_on_two_ranks(name: str, plain: Path, tmp_path: Path) -> None:
    """The plan of each rank is compared with the checkpoint; what is loaded are the parts of the whole."""
    writer = BY_NAME[name]
    write(writer, plain, tmp_path)
    whole = weights_by_path(rank_of_model(tmp_path, writer, 0, 1))
    for rank in range(2):
        for path, (layer, found) in weights_by_path(rank_of_model(tmp_path, writer, rank, 2)).items():
            parts = torch.split(whole[path][1], list(layer.parts.values()))
            if layer.split == "in":
                expected = whole[path][1].chunk(2, 1)[rank]
            else:
                expected = torch.cat([part.chunk(2)[rank] for part in parts])
            assert torch.allclose(found, expected, rtol=1e-6, atol=1e-7), path


@pytest.mark.parametrize("name", REFUSED)
def test_what_two_ranks_cannot_share_is_one_line(name: str, plain: Path, tmp_path: Path) -> None:
    write(BY_NAME[name], plain, tmp_path)
    with pytest.raises((CheckpointError, ConfigError), match=REFUSED[name]) as failed:
        rank_of_model(tmp_path, BY_NAME[name], 0, 2)
    assert "\n" not in str(failed.value)


def test_ragged_blocks_that_a_rank_would_cut() -> None:
    """448 rows are three and a half blocks of 128, and would fit two ranks by their shapes alone: two blocks each."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    layer = ColumnLinear(256, 448)
    layer.path = "m.up_proj"
    quant_for = select(config, torch.float32, placement().kernels)
    layer.bind(placement(quant_for=quant_for))
    with pytest.raises(
        ConfigError, match=r"m\.up_proj\.weight_scale_inv .* every 128 output features, and 224 of them"
    ):
        layer.bind(placement(tp=Axis(0, 2), quant_for=quant_for))
    down = RowLinear(448, 64)
    down.path = "m.down_proj"
    with pytest.raises(
        ConfigError, match=r"m\.down_proj\.weight_scale_inv .* every 128 input features, and 224 of them"
    ):
        down.bind(placement(tp=Axis(1, 2), quant_for=quant_for))
