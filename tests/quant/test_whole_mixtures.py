"""Mixtures of experts quantized in every format through `LLM`: plan, load, greedy tokens, and the logits behind them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoints import write_config, write_random_llama
from tests.quant.test_checkpoints import reference, write
from tests.quant.test_whole_models import EXACT, error, generate
from tests.quant.writers import BY_NAME

EXPERTS, HIDDEN, INNER, HEAD = 4, 64, 64, 16
MOST_USED = ("awq", "ct-w4", "ct-nvfp4", "ct-mxfp4", "fp8-block", "bnb-nf4", "gptq-4-order")
"""The others are slow together, and alike."""
ROUNDED_EXPERTS = 1e-1
"""The reference does not round what goes into experts: FP8 moves those inputs by 3 %, in front of two products a layer."""


def write_random_mixture(folder: Path) -> Path:
    """A Qwen3-MoE: the attention of a random Llama, and four experts in each layer, two for a token."""
    write_random_llama(folder, seed=2)
    rng = np.random.default_rng(3)
    write_config(
        folder, architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", num_experts=EXPERTS, num_experts_per_tok=2,
        moe_intermediate_size=INNER, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
    )  # fmt: skip
    tensors = {name: value for name, value in load_file(folder / "model.safetensors").items() if ".mlp." not in name}

    def add(name: str, *shape: int) -> None:
        tensors[f"{name}.weight"] = (1.7 / np.sqrt(shape[-1]) * rng.standard_normal(shape)).astype(np.float32)

    for layer in range(2):
        path = f"model.layers.{layer}"
        for norm in ("q_norm", "k_norm"):
            tensors[f"{path}.self_attn.{norm}.weight"] = np.ones(HEAD, np.float32)
        add(f"{path}.mlp.gate", EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for part in ("gate_proj", "up_proj"):
                add(f"{path}.mlp.experts.{expert}.{part}", INNER, HIDDEN)
            add(f"{path}.mlp.experts.{expert}.down_proj", HIDDEN, INNER)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_mixture(tmp_path_factory.mktemp("mixture"))


def cases() -> list[Any]:
    return [name if name in MOST_USED else pytest.param(name, marks=pytest.mark.slow) for name in BY_NAME]


@pytest.mark.parametrize("name", cases())
def test_exact_logits(name: str, mixture: Path, tmp_path: Path) -> None:
    """In float32 nothing but the order of sums differs from the weights that are meant, and what rounding inputs does."""
    writer = BY_NAME[name]
    meant = write(writer, mixture, tmp_path)
    found = generate(tmp_path, dtype="float32")
    assert error(found, reference(tmp_path, meant, writer)) < (EXACT if writer.inputs is None else ROUNDED_EXPERTS)
