"""Whole checkpoints of every format through the real loader: logits are those of the weights that the format means."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError
from samovar.layers import Linear, bind
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build
from samovar.quant.base import QuantMethod
from samovar.quant.select import select
from samovar.quant.stored import Stored
from samovar.quant.unquantized import Unquantized
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import load_weights
from samovar.weights.plan import layers_of
from tests.checkpoints import write_random_llama
from tests.models.paged_run import PagedRun, placement
from tests.quant.writers import BY_NAME, WRITERS, Writer

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = [5, 9, 77, 130, 41, 200, 8, 3, 60, 61, 62]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hidden 64, two layers: parts of the fused q, k, v have 64, 32 and 32 rows."""
    return write_random_llama(tmp_path_factory.mktemp("plain"), seed=2)


def write(writer: Writer, plain: Path, folder: Path, linears: tuple[str, ...] = LINEARS) -> dict[str, torch.Tensor]:
    """The model quantized in `folder`; gives its tensors as a plain model with the same meaning has them."""
    folder.mkdir(exist_ok=True)
    for file in plain.iterdir():
        if file.suffix == ".json":
            (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": writer.config}))
    tensors, meant = {}, {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        module = name.removesuffix(".weight")
        if not module.endswith(linears) or module.endswith(writer.skipped or ("-",)):
            tensors[name] = meant[name] = tensor
            continue
        stored, weight = writer.linear(module, tensor.double().numpy())
        tensors |= {f"{module}.{key}": as_tensor(value) for key, value in stored.items()}
        meant[name] = torch.from_numpy(np.ascontiguousarray(weight)).float()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return meant


def as_tensor(value: Any) -> torch.Tensor:
    return (
        value
        if isinstance(value, torch.Tensor)
        else torch.from_numpy(np.ascontiguousarray(value).reshape(np.shape(value)))
    )


def loaded(folder: Path, *, with_shapes: bool) -> DecoderLM:
    """A bound model, filled by the loader."""
    description = describe(folder, ModelConfig())
    model = build(description.architecture, description.config)
    place = placement()
    with open_checkpoint(description) as checkpoint:
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()} if with_shapes else None
        declared: Mapping[str, Any] = description.config["quantization_config"]
        bind(model, placement(quant_for=select(declared, torch.float32, place.kernels, shapes=shapes)))
        load_weights(model, checkpoint)
    return model


class RoundedInputs(Unquantized):
    """Plain weights, of which the activations are rounded by NumPy."""

    def __init__(self, writer: Writer) -> None:
        super().__init__(torch.float32, placement().kernels)
        self.writer = writer

    def multiply(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        assert self.writer.inputs is not None
        return super().multiply(torch.from_numpy(self.writer.inputs(x.numpy())), weights, bias)


def reference(folder: Path, meant: Mapping[str, torch.Tensor], writer: Writer) -> DecoderLM:
    """The plain model with the weights that were meant."""
    description = describe(folder, ModelConfig())
    model = build(description.architecture, description.config)

    def quant_for(path: str) -> QuantMethod:
        rounds = writer.inputs is not None and "lm_head" not in path
        return RoundedInputs(writer) if rounds else Unquantized(torch.float32, placement().kernels)

    bind(model, placement(quant_for=quant_for))
    for layer in layers_of(model):
        for source in layer.sources():
            source.target.copy_(meant[source.name])
        layer.after_load()
    return model


def logits(model: DecoderLM) -> torch.Tensor:
    """A prompt in two chunks."""
    run = PagedRun(model, TorchSdpaAttention())
    stream = run.stream(len(PROMPT))
    return torch.cat([*run.step([(stream, PROMPT[:7])]), *run.step([(stream, PROMPT[7:])])])


@pytest.mark.parametrize("name", BY_NAME)
def test_logits_are_those_of_the_weights_that_are_meant(name: str, plain: Path, tmp_path: Path) -> None:
    """float32 on both sides, so only the order of sums differs; one rounded activation more or less is within reach."""
    writer = BY_NAME[name]
    meant = write(writer, plain, tmp_path)
    expected = logits(reference(tmp_path, meant, writer))
    for with_shapes in (True, False):
        if writer.needs_shapes and not with_shapes:
            continue
        model = loaded(tmp_path, with_shapes=with_shapes)
        quantized = [
            layer for layer in model.modules() if isinstance(layer, Linear) and isinstance(layer.quant, Stored)
        ]
        assert len(quantized) == 8 - len(writer.skipped) // 2
        found = logits(model)
        tolerance = 2e-5 if writer.inputs is None else 2e-2
        assert float((found - expected).abs().max()) < tolerance * float(expected.abs().max())


@pytest.mark.parametrize("name", BY_NAME)
def test_weights_are_kept_as_they_are_stored(name: str, plain: Path, tmp_path: Path) -> None:
    """Nothing that is held has the size of a plain weight, and all weights are what was meant."""
    writer = BY_NAME[name]
    meant = write(writer, plain, tmp_path)
    model = loaded(tmp_path, with_shapes=True)
    both = torch.cat([meant[f"model.layers.1.mlp.{part}_proj.weight"] for part in ("gate", "up")])
    layer, found = dequantized(model, "model.layers.1.mlp.gate_up_proj")
    assert torch.allclose(found, both, rtol=1e-6, atol=1e-7)
    assert max(tensor.nbytes for tensor in layer.weights.values()) <= both.numel()
    three = torch.cat([meant[f"model.layers.1.self_attn.{part}_proj.weight"] for part in "qkv"])
    assert torch.allclose(dequantized(model, "model.layers.1.self_attn.qkv_proj")[1], three, rtol=1e-6, atol=1e-7)


def dequantized(model: DecoderLM, path: str) -> tuple[Linear, torch.Tensor]:
    """A quantized layer and the weight that it stands for."""
    layer = model.get_submodule(path)
    assert isinstance(layer, Linear) and isinstance(layer.quant, Stored)
    return layer, layer.quant.dequantize(layer.weights)


# --- what is wrong with a checkpoint is said in one line


def fails(folder: Path, *, with_shapes: bool = True) -> str:
    with pytest.raises(CheckpointError) as error:
        loaded(folder, with_shapes=with_shapes)
    assert "\n" not in str(error.value)
    return str(error.value)


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    for key, value in changes.items():
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("gptq-3", "scales"), ("gptq-3", "qzeros"), ("awq", "scales"), ("ct-w4-asym", "weight_zero_point"),
        ("ct-nvfp4", "weight_global_scale"), ("modelopt-nvfp4", "weight_scale_2"), ("fp8-block", "weight_scale_inv"),
        ("ct-mxfp4", "weight_scale"), ("bnb-nf4", "weight.absmax"), ("bnb-int8", "SCB"),
    ],
)  # fmt: skip
def test_missing_and_extra_scales(name: str, scale: str, plain: Path, tmp_path: Path) -> None:
    write(BY_NAME[name], plain, tmp_path)
    missing, extra = f"model.layers.1.mlp.up_proj.{scale}", "model.layers.0.mlp.up_proj.weight_scale_3"
    change(tmp_path, **{missing: None, extra: torch.ones(1)})
    message = fails(tmp_path)
    assert f"1 tensors are missing from the checkpoint: {missing}" in message
    assert "1 checkpoint tensors are read by no layer" in message and extra in message


def test_a_static_scale_that_only_some_parts_have(plain: Path, tmp_path: Path) -> None:
    write(BY_NAME["modelopt-fp8"], plain, tmp_path)
    name = "model.layers.0.self_attn.k_proj.input_scale"
    change(tmp_path, **{name: None})
    assert name in fails(tmp_path)


def test_shapes_that_do_not_fit(plain: Path, tmp_path: Path) -> None:
    write(BY_NAME["gptq-4-v2"], plain, tmp_path)
    change(tmp_path, **{"model.layers.0.mlp.down_proj.scales": torch.ones(4, 64)})
    assert "model.layers.0.mlp.down_proj.scales (layer holds (8, 64), checkpoint gives (4, 64))" in fails(tmp_path)


@pytest.mark.parametrize("group_size", [48, 40, 24])
def test_odd_group_sizes(group_size: int, plain: Path, tmp_path: Path) -> None:
    for name in ("gptq-3", "awq"):
        writer = BY_NAME[name]
        changed = Writer(name, writer.config | {"group_size": group_size}, writer.linear)
        write(changed, plain, tmp_path)
        message = fails(tmp_path)
        assert f"for every {group_size} input features" in message and "q_proj." in message


def test_groups_that_are_not_there(plain: Path, tmp_path: Path) -> None:
    write(BY_NAME["gptq-4-order"], plain, tmp_path)
    name = "model.layers.0.mlp.down_proj.g_idx"
    order = load_file(tmp_path / "model.safetensors")[name]
    change(tmp_path, **{name: order + 1})
    assert "down_proj.g_idx names group 4, but only 4 are here" in fails(tmp_path)


def test_zero_points_of_version_one_wrap() -> None:
    """B161: 15 means 0 in version 1 of GPTQ, and 15 in version 2; every one of the sixteen values is tried."""
    from samovar.layers import RowLinear
    from tests.quant.filling import fill

    for version, meaning in (("gptq", [(stored + 1) % 16 for stored in range(16)]), ("gptq_v2", list(range(16)))):
        config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "checkpoint_format": version}
        layer = RowLinear(8, 16)
        layer.path = "l"
        layer.bind(placement(quant_for=select(config, torch.float32, placement().kernels)))
        packed = torch.tensor([[0x76543210, 0xFEDCBA98 - (1 << 32)]], dtype=torch.int32)
        tensors = {"l.qweight": torch.zeros(1, 16, dtype=torch.int32), "l.qzeros": packed}
        tensors |= {"l.scales": torch.ones(1, 16), "l.g_idx": torch.zeros(8, dtype=torch.int32)}
        fill(layer, tensors)
        assert isinstance(layer.quant, Stored)
        assert layer.quant.dequantize(layer.weights)[:, 0].tolist() == [-float(zero) for zero in meaning]


def test_dialects_of_nvfp4_are_the_same_weights(plain: Path, tmp_path: Path) -> None:
    """compressed-tensors divides by what ModelOpt multiplies with: bit for bit the same."""
    found = []
    for name in ("ct-nvfp4", "modelopt-nvfp4"):
        write(BY_NAME[name], plain, tmp_path / name)
        model = loaded(tmp_path / name, with_shapes=True)
        found.append(dequantized(model, "model.layers.0.self_attn.qkv_proj")[1])
    assert torch.equal(*found)


def test_every_writer_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(WRITERS)
