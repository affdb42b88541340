"""Mixtures of experts from checkpoints on disk, written by Transformers in the layout that is published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError
from samovar.layers import bind
from samovar.models.registry import build
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import load_weights
from tests.models.paged_run import PagedRun, placement
from tests.models.transformers_oracle import oracle, tokens

NAMES = ["qwen3-moe", "qwen2-moe", "mixtral", "olmoe", "granitemoe", "gpt-oss", "glm4-moe", "minimax-m2"]
EXPECTED = {
    "qwen3-moe": "model.layers.0.mlp.experts.3.gate_proj.weight",
    "qwen2-moe": "model.layers.1.mlp.shared_expert_gate.weight",
    "mixtral": "model.layers.0.block_sparse_moe.experts.1.w3.weight",
    "olmoe": "model.layers.0.mlp.gate.weight",
    "granitemoe": "model.layers.0.block_sparse_moe.input_linear.weight",
    "gpt-oss": "model.layers.0.mlp.experts.gate_up_proj_bias",
    "glm4-moe": "model.layers.1.mlp.gate.e_score_correction_bias",
    "minimax-m2": "model.layers.0.block_sparse_moe.e_score_correction_bias",
}
"""One name each that published checkpoints have."""


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """Logits of a prompt by the checkpoint in `folder`."""
    description = describe(folder, ModelConfig())
    model = build(description.architecture, description.config)
    bind(model, placement())
    with open_checkpoint(description) as checkpoint:
        load_weights(model, checkpoint)
    run = PagedRun(model, TorchSdpaAttention())
    (found,) = run.step([(run.stream(len(ids)), ids)])
    return found


@pytest.mark.parametrize("name", NAMES)
def test_a_published_checkpoint_is_read(name: str, tmp_path: Path) -> None:
    subject, ids = oracle(name), tokens(15, 80)
    subject.model.save_pretrained(tmp_path)
    assert EXPECTED[name] in load_file(tmp_path / "model.safetensors")
    assert float((logits_of(tmp_path, ids) - subject.logits(ids)).abs().max()) < 1e-4


def test_layers_that_guess_further_tokens_are_left_unread(tmp_path: Path) -> None:
    """GLM-4.5 has one behind its last layer; anything else that nobody reads stops the load."""
    subject, ids = oracle("glm4-moe"), tokens(15, 80)
    subject.model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(4, 4), "model.layers.3.mlp.gate.weight": torch.ones(6, 64)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    assert float((logits_of(tmp_path, ids) - subject.logits(ids)).abs().max()) < 1e-4
    save_file({**tensors, "model.layers.33.eh_proj.weight": torch.ones(4, 4)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"read by no layer.*layers\.33\.eh_proj"):
        logits_of(tmp_path, ids)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    oracle("mixtral").model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.block_sparse_moe.experts.2.w2.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"1 tensors are missing.*layers\.1\.block_sparse_moe\.experts\.2\.w2"):
        logits_of(tmp_path, tokens(3, 0))
