"""Checkpoints of families with gated delta nets as they are published: with eyes, with layers that draft, in 8 bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError, ConfigError
from samovar.kernels.op import Kernels, Target
from samovar.layers import Layer, Source, bind
from samovar.layers.arranged import ArrangedLinear
from samovar.models.registry import build
from samovar.parallel.mesh import Axis
from samovar.quant.select import select
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import load_weights
from tests.models.paged_run import PagedRun, placement
from tests.models.transformers_oracle import oracle, tokens

NAMES = {
    "qwen3-next": "model.layers.0.linear_attn.in_proj_qkvz.weight",
    "qwen3.5-eyes": "model.language_model.layers.0.linear_attn.in_proj_qkv.weight",
    "qwen3.5-moe-eyes": "model.language_model.layers.0.mlp.shared_expert_gate.weight",
}
"""One name each that published checkpoints have."""


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """Logits of a prompt by the checkpoint in `folder`."""
    description = describe(folder, ModelConfig())
    model = build(description.architecture, description.config)
    with open_checkpoint(description) as checkpoint:
        bind(model, placement(stored_shapes={name: each.shape for name, each in checkpoint.tensors.items()}))
        load_weights(model, checkpoint)
    run = PagedRun(model, TorchSdpaAttention())
    (found,) = run.step([(run.stream(len(ids)), ids)])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_published_checkpoint_is_read(name: str, tmp_path: Path) -> None:
    """What sees and what drafts is left unread."""
    subject, ids = oracle(name), tokens(15, 80)
    subject.model.save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    assert NAMES[name] in found
    save_file({**found, "mtp.fc.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors", {"format": "pt"})
    assert float((logits_of(tmp_path, ids) - subject.logits(ids)).abs().max()) < 1e-4
    save_file({**found, "model.layers.0.extra": torch.ones(2)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="extra"):
        logits_of(tmp_path, ids)


def test_experts_may_be_one_tensor(tmp_path: Path) -> None:
    """Qwen3.5-35B-A3B holds experts so; its 8-bit checkpoints hold them one by one."""
    subject, ids = oracle("qwen3.5-moe-eyes"), tokens(15, 80)
    subject.model.save_pretrained(tmp_path)
    found = load_file(tmp_path / "model.safetensors")
    one_by_one = {name for name in found if ".experts." in name}
    own = subject.model.state_dict()
    stacked = {name: own[name].contiguous() for name in own if ".experts." in name}
    assert len(stacked) < len(one_by_one)
    rest = {name: tensor for name, tensor in found.items() if name not in one_by_one}
    save_file({**rest, **stacked}, tmp_path / "model.safetensors", {"format": "pt"})
    assert float((logits_of(tmp_path, ids) - subject.logits(ids)).abs().max()) < 1e-4


def test_what_is_not_known_is_refused() -> None:
    raw = oracle("qwen3.5").raw
    with pytest.raises(CheckpointError, match="attn_output_gate is false"):
        build("Qwen3_5ForCausalLM", {**raw, "attn_output_gate": False})
    with pytest.raises(CheckpointError, match="linear_num_value_heads 6 is not a multiple of linear_num_key_heads 4"):
        build("Qwen3_5ForCausalLM", {**raw, "linear_num_value_heads": 6})
    with pytest.raises(ConfigError, match="key heads"):
        bind(build("Qwen3_5ForCausalLM", {**raw, "vocab_size": 128}), placement(tp=Axis(0, 8)))


def in_blocks(weight: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """8-bit codes, a scale for each block of `block` by `block`, and what they stand for."""
    rows, columns = weight.shape
    tiles = weight.view(rows // block, block, columns // block, block)
    scale = tiles.abs().amax((1, 3)) / 448
    codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn)
    exact = codes.float() * scale[:, None, :, None]
    return codes.view_as(weight), scale, exact.view_as(weight)


def copy(source: Source, tensor: torch.Tensor) -> None:
    """What loading does."""
    if source.axis is not None:
        rows = tensor.shape[source.axis] // source.shard[1]
        tensor = tensor.narrow(source.axis, source.shard[0] * rows, rows)
    source.target.copy_(tensor)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_some_projections_in_8_bits(name: str) -> None:
    """Published FP8 checkpoints have big projections in blocks and the small ones plain, which are one product here; rows are
    moved with their scales."""
    subject, block = oracle(name), 4
    config = {"quant_method": "fp8", "weight_block_size": [block, block], "activation_scheme": "dynamic"}
    kernels = Kernels(Target("cpu", "", torch.float32), "cpu")
    tensors, exact = dict(subject.tensors), dict(subject.tensors)
    kept: list[str] = []
    for path, tensor in subject.tensors.items():
        if path.endswith(".weight") and tensor.dim() == 2 and "proj" in path:
            if path.endswith(("in_proj_qkvz.weight", "in_proj_qkv.weight", "in_proj_z.weight", "q_proj.weight")):
                tensors[path], tensors[f"{path}_scale_inv"], exact[path] = in_blocks(tensor, block)
            else:
                kept.append(path.removesuffix(".weight"))
    stored: dict[str, Any] = {**config, "modules_to_not_convert": [*kept, "lm_head", "mlp", "experts"]}
    products = []
    for these, quant_for in ((exact, None), (tensors, select(stored, torch.float32, kernels))):
        model = build(subject.family.architecture, subject.raw)
        bind(model, placement(quant_for=quant_for))
        layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
        for source in (source for layer in layers for source in layer.sources()):
            copy(source, these[source.name])
        for layer in layers:
            layer.after_load()
        x = torch.randn(9, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
        products.append([layer.project(x) for layer in layers if isinstance(layer, ArrangedLinear)])
    for plain, coded in zip(*products, strict=True):
        # Inputs of 8-bit products are rounded, too: to four bits.
        assert 0 < float((coded - plain).norm() / plain.norm()) < 0.04
