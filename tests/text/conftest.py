"""Real vocabularies, templates and models for the text tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from samovar.text.fast_tokenizer import FastTokenizer
from samovar.text.gguf_tokenizer import load_gguf
from tests.packages import package_folder

LLAMA_CPP = ("llama-cpp-python", "0.3.36")
LLAMA_CPP_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_MODELS = "vendor/llama.cpp/models/"


@pytest.fixture(scope="session")
def vocabularies() -> Path:
    """Folder with llama.cpp's vocabulary-only GGUF files, their inputs and expected ids, and 70 chat templates."""
    return package_folder(*LLAMA_CPP, _MODELS, LLAMA_CPP_SHA256) / _MODELS


@pytest.fixture(scope="session")
def chat_templates(vocabularies: Path) -> list[Path]:
    """The published chat templates."""
    return sorted((vocabularies / "templates").glob("*.jinja"))


@pytest.fixture(scope="session")
def smollm2_tokenizer(smollm2: Path) -> FastTokenizer:
    """Byte-level BPE with ChatML control tokens and no BOS."""
    return load_gguf(smollm2)


@pytest.fixture(scope="session")
def spm_tokenizer(vocabularies: Path) -> FastTokenizer:
    """Llama 2's SentencePiece vocabulary: BOS, a space before every text, byte fallback."""
    return load_gguf(vocabularies / "ggml-vocab-llama-spm.gguf")
