"""Text models of checkpoints that see: on disk as published, under either of their names, and without what is left out."""

from __future__ import annotations

import json
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

EXPECTED = {
    "gemma3-eyes": "language_model.model.layers.0.self_attn.q_norm.weight",
    "gemma4-eyes": "model.language_model.layers.0.per_layer_input_gate.weight",
    "mistral3-eyes": "language_model.lm_head.weight",
    "llama4-eyes": "language_model.model.layers.1.feed_forward.experts.gate_up_proj",
}
"""One name each that published checkpoints have."""


def logits_of(folder: Path, ids: list[int]) -> torch.Tensor:
    """Logits of a prompt by the checkpoint in `folder`."""
    description = describe(folder, ModelConfig())
    model = build(description.architecture, description.config)
    assert any("text only" in note for note in model.notes)
    with open_checkpoint(description) as checkpoint:
        bind(model, placement(stored_shapes={name: info.shape for name, info in checkpoint.tensors.items()}))
        load_weights(model, checkpoint)
    run = PagedRun(model, TorchSdpaAttention())
    (found,) = run.step([(run.stream(len(ids)), ids)])
    return found


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_checkpoint_is_read(name: str, tmp_path: Path) -> None:
    subject, ids = oracle(name), tokens(15, 80)
    subject.model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert EXPECTED[name] in tensors
    assert float((logits_of(tmp_path, ids) - subject.logits(ids)).abs().max()) < 1e-4
    save_file({**tensors, "other_tower.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"read by no layer.*other_tower\.weight"):
        logits_of(tmp_path, ids)


@pytest.mark.parametrize("name", ["gemma3-eyes", "mistral3-eyes"])
def test_names_of_other_tools_are_known(name: str, tmp_path: Path) -> None:
    """Transformers has written them as they stand in its own tree."""
    subject, ids = oracle(name), tokens(15, 80)
    subject.model.save_pretrained(tmp_path)
    state = {key: tensor.contiguous() for key, tensor in subject.model.state_dict().items()}
    if subject.model.config.get_text_config().tie_word_embeddings:
        del state["lm_head.weight"]
    assert "model.language_model.embed_tokens.weight" in state
    save_file(state, tmp_path / "model.safetensors")
    assert float((logits_of(tmp_path, ids) - subject.logits(ids)).abs().max()) < 1e-4


def test_what_gemma_3_leaves_out_is_known(tmp_path: Path) -> None:
    """The file of 4B says hardly more than this of its text model."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    text["rope_scaling"] = {"factor": 8.0, "rope_type": "linear"}  # type: ignore[assignment]
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    description = describe(tmp_path, ModelConfig(load_format="dummy"))
    assert (description.vocab_size, description.max_position_embeddings) == (262_208, 131_072)
    read = build(description.architecture, description.config).config
    assert (read.num_attention_heads, read.num_key_value_heads, read.head_dim) == (8, 4, 256)
    assert [read.window_of(i) for i in range(6)] == [1024] * 5 + [None]
    assert (read.rope_of(0).rope_type, read.rope_of(5).rope_type, read.rope_of(5).factor) == ("default", "linear", 8.0)
