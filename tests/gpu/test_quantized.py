"""Quantized checkpoints of every format on a GPU: the logits of the weights that they mean, in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from samovar.config.weight_formats import AT_LOAD
from tests.checkpoints import write_random_llama
from tests.quant.test_checkpoints import LINEARS, plain, reference, write
from tests.quant.test_whole_models import HEADS, NEAR, error, generate
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
