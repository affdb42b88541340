"""Quantized checkpoints of every format on a GPU: the logits of the weights that they mean, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from samovar import LLM
from samovar.config.weight_formats import AT_LOAD
from tests.checkpoints import write_random_llama
from tests.quant.test_checkpoints import LINEARS, plain, reference, write
from tests.quant.test_whole_mixtures import write_random_mixture
from tests.quant.test_whole_models import HEADS, NEAR, OPTIONS, error, generate
from tests.quant.writers import BY_NAME, Writer

__all__ = ["plain"]

PLAIN, ROUNDED = 5e-2, 3e-1
"""Errors of logits, by their size: activations in bfloat16 (0.2 % of their size, in front of 15 products, and what two
layers of attention make of it). Rounding them to FP8 changes these logits by 0.2, and where bfloat16 differs another way."""


@pytest.mark.parametrize("name", BY_NAME)
def test_logits(name: str, plain: Path, tmp_path: Path, device: str) -> None:
    writer = BY_NAME[name]
    meant = write(writer, plain, tmp_path)
    found = generate(tmp_path, dtype="bfloat16", device=device)
    assert error(found, reference(tmp_path, meant, writer)) < (PLAIN if writer.inputs is None else ROUNDED)


@pytest.mark.parametrize("writer", HEADS, ids=lambda writer: writer.name)
def test_a_quantized_head(writer: Writer, tmp_path: Path, device: str) -> None:
    whole = write_random_llama(tmp_path / "plain", seed=2, vocab_size=464)
    meant = write(writer, whole, tmp_path / "quantized", (*LINEARS, "lm_head"))
    found = generate(tmp_path / "quantized", dtype="bfloat16", device=device)
    assert error(found, reference(tmp_path / "quantized", meant, writer)) < PLAIN


@pytest.mark.parametrize("name", AT_LOAD)
def test_at_load(name: str, plain: Path, device: str) -> None:
    model = reference(plain, dict(load_file(plain / "model.safetensors")), Writer("plain", {}, BY_NAME["awq"].linear))
    assert 1e-3 < error(generate(plain, quantization=name, dtype="bfloat16", device=device), model) < NEAR[name]


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_mixture(tmp_path_factory.mktemp("mixture"))


@pytest.mark.parametrize("name", BY_NAME)
def test_mixtures(name: str, mixture: Path, tmp_path: Path, device: str) -> None:
    """Experts stay packed where their format allows it; their activations are not rounded."""
    writer = BY_NAME[name]
    meant = write(writer, mixture, tmp_path)
    found = generate(tmp_path, dtype="bfloat16", device=device)
    assert error(found, reference(tmp_path, meant, writer)) < (PLAIN if writer.inputs is None else ROUNDED)


@pytest.mark.parametrize("cache", ["fp8_e4m3", "int8", "k8v4"])
def test_caches_of_codes(cache: str, plain: Path, device: str) -> None:
    """A quantized model with a quantized cache: what rows of the cache lose (docs/quantization.md) in two layers."""
    model = reference(plain, dict(load_file(plain / "model.safetensors")), Writer("plain", {}, BY_NAME["awq"].linear))
    found = generate(plain, dtype="bfloat16", device=device, kv_cache_dtype=cache)
    assert error(found, model) < {"fp8_e4m3": 0.15, "int8": 0.08, "k8v4": 0.4}[cache]


@pytest.mark.parametrize("name", ["ct-nvfp4", "awq", "bnb-nf4", "fp8-block"])
def test_the_self_test_finds_nothing(name: str, plain: Path, tmp_path: Path, device: str) -> None:
    write(BY_NAME[name], plain, tmp_path)
    with LLM(str(tmp_path), **OPTIONS, dtype="bfloat16", device=device) as llm:
        assert not [line for line in llm.info.routes if line.startswith("self-test")]
