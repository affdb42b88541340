"""Fixtures every room may use: tiny checkpoints, and the real SmolLM2 file where it can be had."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

from samovar.hardware.device import may_have_gpu

if not may_have_gpu():
    # Before anything imports Triton: without a GPU its kernels run on CPU tensors in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # 3.9 warns where this is not said

from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError
from samovar.hub.locate import locate
from tests.checkpoints import write_random_llama, write_script_model

# A busy machine is no reason to fail: what must be fast has a test of its own.
settings.register_profile("house", deadline=None)
settings.load_profile("house")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with a byte-level tokenizer and a ChatML template."""
    return write_random_llama(tmp_path_factory.mktemp("tiny-llama"))


@pytest.fixture
def script_model(tmp_path: Path) -> Callable[..., Path]:
    """Makes models that say what they are told; see `write_script_model`."""
    count = 0

    def make(pieces: list[str | bytes | int], **options: object) -> Path:
        nonlocal count
        count += 1
        return write_script_model(tmp_path / f"script-{count}", pieces, **options)  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The SmolLM2-135M-Instruct GGUF, from the user's cache or its package; skips where it cannot be had."""
    try:
        return locate(ModelConfig(model="smollm2"))
    except CheckpointError as error:
        pytest.skip(f"SmolLM2 cannot be had: {error}")
