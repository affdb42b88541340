"""Blocks as a GGUF file stores them: read, un-permuted, cut and packed; what comes out is what dequantizing gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.dequantize import dequantize
from tests.weights.gguf_files import tiny_model, write_gguf

QUANTS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"]
"""Types that the `gguf` package can write."""


def blocks_and_numbers(path: Path, name: str, **cut: object) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor, or a part of it, as stored and as numbers."""
    description = describe(path, ModelConfig())
    with open_checkpoint(description, blocks={name}) as stored, open_checkpoint(description) as numbers:
        return stored.read(name, **cut), numbers.read(name, **cut)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj"])
@pytest.mark.parametrize("quant", QUANTS)
def test_blocks_hold_the_numbers(quant: str, name: str, tmp_path: Path) -> None:
    """Also where the file has the rows of a head in another order."""
    write_gguf(tmp_path / "q.gguf", tiny_model("llama"), quant=quant)
    path = f"model.layers.1.{name}.weight"
    blocks, numbers = blocks_and_numbers(tmp_path / "q.gguf", path)
    assert blocks.dtype == torch.uint8 and blocks.shape[:2] == (len(numbers), numbers.shape[1] // 32)
    assert torch.equal(dequantize(quant, blocks.flatten(0, 1)).view(numbers.shape), numbers)


@pytest.mark.parametrize("axis", [0, 1])
def test_shards_are_whole_blocks(axis: int, tmp_path: Path) -> None:
    write_gguf(tmp_path / "q.gguf", tiny_model("llama"), quant="Q4_1")
    name = "model.layers.0.self_attn.o_proj.weight"
    for shard in ((0, 2), (1, 2)):
        blocks, numbers = blocks_and_numbers(tmp_path / "q.gguf", name, axis=axis, shard=shard)
        assert torch.equal(dequantize("Q4_1", blocks.flatten(0, 1)).view(numbers.shape), numbers)
    with pytest.raises(CheckpointError, match="does not divide"):
        blocks_and_numbers(tmp_path / "q.gguf", name, axis=1, shard=(0, 4))


def test_half_a_head_of_blocks_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "q.gguf", tiny_model("llama"), quant="Q8_0")
    with pytest.raises(CheckpointError, match="whole heads"):
        blocks_and_numbers(tmp_path / "q.gguf", "model.layers.0.self_attn.q_proj.weight", axis=0, shard=(0, 8))


def test_equal_tensors_may_be_wanted_in_two_forms(tmp_path: Path) -> None:
    """A tied head is not read, so it is not wanted as blocks; it is compared with the embedding nevertheless."""
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight.copy_(model.model.embed_tokens.weight)
    write_gguf(tmp_path / "q.gguf", model, quant="Q8_0")
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    with open_checkpoint(describe(tmp_path / "q.gguf", ModelConfig()), blocks={embedding}) as checkpoint:
        assert checkpoint.equal(embedding, head) and checkpoint.equal(head, embedding)
        assert not checkpoint.equal(embedding, "model.layers.0.mlp.up_proj.weight")
