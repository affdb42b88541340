"""Quantized checkpoints of every format through `LLM`: config, plan, load, greedy tokens, and the logits behind them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from samovar import LLM, SamplingParams
from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.config.weight_formats import AT_LOAD
from samovar.errors import CheckpointError, ConfigError
from samovar.models.decoder import DecoderLM
from samovar.native import library
from samovar.quant.online_formats import FORMATS
from tests.checkpoints import write_random_llama
from tests.models.paged_run import PagedRun
from tests.quant.test_checkpoints import LINEARS, PROMPT, change, plain, reference, write
from tests.quant.writers import BY_NAME, GPTQ, INT4, Writer, compressed, numbers

__all__ = ["plain"]

OPTIONS: dict[str, Any] = {
    "max_model_len": 256, "num_gpu_blocks_override": 64, "threads": 1, "max_logprobs": -1, "max_num_seqs": 4,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=-1)
EXACT, ROUNDED = 1e-5, 2e-2
"""Errors of logits, by their size: sums in another order; one rounded activation more or less."""
HELD = 6e-2
"""The same where the CPU library rounds activations, to 8 bits in groups of 32 (0.6 % of their size) or to bfloat16, in
front of each of 15 products: about 0.6 % times the root of 15, and a factor of two for what attention makes of it."""
BLOCKS = {
    "gptq-3": "14 Q4_0", "awq": "14 Q5_0", "auto-round": "14 Q5_0", "ct-w4": "14 Q4_0", "ct-w4-asym": "14 Q5_0",
    "ct-mxfp4": "14 Q5_0", "mxfp4": "10 Q5_0",
}  # fmt: skip
"""Formats that are integers times a scale for whole blocks; all others become numbers."""

needs_library = pytest.mark.skipif(library.find() is None, reason="the CPU kernels are not built")


def generate(folder: Path, **options: Any) -> tuple[list[int], torch.Tensor, list[str]]:
    """(ids, log-probabilities [tokens, vocabulary] behind them, what the engine says about its weights)."""
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        output = llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0]
        lines = [line for line in llm.info.routes if line.startswith(("model step", "weights"))]
    assert output.logprobs is not None
    rows = [[step[i].logprob for i in range(len(step))] for step in output.logprobs]
    return list(output.token_ids), torch.tensor(rows), lines


def error(found: tuple[list[int], torch.Tensor, list[str]], model: DecoderLM) -> float:
    """How far logits are from those of `model` behind the same tokens, by their size."""
    ids, rows, _ = found
    run = PagedRun(model, TorchSdpaAttention())
    text = PROMPT + ids[:-1]
    expected = run.step([(run.stream(len(text)), text)])[0][len(PROMPT) - 1 :].log_softmax(-1)
    expected, rows = (x - x.mean(-1, keepdim=True) for x in (expected, rows))
    return float((rows - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", BY_NAME)
def test_exact_logits(name: str, plain: Path, tmp_path: Path) -> None:
    """In float32 nothing but the order of sums differs from the weights that are meant."""
    writer = BY_NAME[name]
    meant = write(writer, plain, tmp_path)
    found = generate(tmp_path, dtype="float32")
    assert error(found, reference(tmp_path, meant, writer)) < (EXACT if writer.inputs is None else ROUNDED)


@needs_library
@pytest.mark.parametrize("name", BY_NAME)
def test_as_the_cpu_library_holds_them(name: str, plain: Path, tmp_path: Path) -> None:
    """By default a step is one call of the library: on blocks where those are exact, else on bfloat16 numbers."""
    writer = BY_NAME[name]
    meant = write(writer, plain, tmp_path)
    found = generate(tmp_path)
    unrounded = Writer(writer.name, writer.config, writer.linear)
    assert error(found, reference(tmp_path, meant, unrounded)) < HELD
    assert any("whole step in one call" in line for line in found[2])
    assert any(f"weights: {BLOCKS.get(name, '16 BF16')}" in line for line in found[2])
    assert any("held as BF16" in line for line in found[2]) == (name not in BLOCKS)
    assert any("activations are not rounded" in line for line in found[2]) == (writer.inputs is not None)


# --- the head


HEADS = [
    Writer("gptq", {**GPTQ, "bits": 4, "group_size": 32, "lm_head": True}, BY_NAME["gptq-4-order"].linear),
    Writer("ct-w4", compressed("pack-quantized", INT4) | {"ignore": []}, BY_NAME["ct-w4"].linear),
    Writer("modelopt", {"quant_method": "modelopt", "quant_algo": "NVFP4"}, BY_NAME["modelopt-nvfp4"].linear),
    Writer(
        "ct-fp8",
        compressed("float-quantized", numbers(8, "float", "channel")) | {"ignore": []},
        BY_NAME["ct-fp8-rows"].linear,
    ),
]


@pytest.mark.parametrize("writer", HEADS, ids=lambda writer: writer.name)
def test_a_quantized_head(writer: Writer, tmp_path: Path) -> None:
    whole = write_random_llama(tmp_path / "plain", seed=2, vocab_size=464)
    meant = write(writer, whole, tmp_path / "quantized", (*LINEARS, "lm_head"))
    model = reference(tmp_path / "quantized", meant, writer)
    assert error(generate(tmp_path / "quantized", dtype="float32"), model) < EXACT
    assert error(generate(tmp_path / "quantized"), model) < HELD


# --- parts of one matrix that are stored differently


def test_parts_in_different_formats(plain: Path, tmp_path: Path) -> None:
    """q and k in four bits, v in FP8, gate plain, up in four bits."""
    config = compressed("mixed-precision", INT4)
    config["config_groups"] = {
        "four": {"targets": ["re:.*(q|k|up)_proj"], "weights": INT4, "format": "pack-quantized"},
        "eight": {"targets": ["re:.*v_proj"], "weights": numbers(8, "float", "channel"), "format": "float-quantized"},
    }

    def linear(name: str, weight: Any) -> Any:
        return BY_NAME["ct-fp8-rows" if name.endswith("v_proj") else "ct-w4"].linear(name, weight)

    writer = Writer("mixed", config, linear)
    meant = write(writer, plain, tmp_path, ("q_proj", "k_proj", "v_proj", "up_proj"))
    model = reference(tmp_path, meant, writer)
    assert error(generate(tmp_path, dtype="float32"), model) < EXACT
    found = generate(tmp_path)
    assert error(found, model) < HELD
    if library.find() is not None:
        assert any("whole step in one call" in line for line in found[2])
        assert any("weights: 10 BF16, 6 Q4_0" in line for line in found[2])


# --- biases that tools write for linears without one


def test_zero_biases(plain: Path, tmp_path: Path) -> None:
    """AutoGPTQ stores a bias for every linear: zeros are nothing, anything else is refused."""
    writer = BY_NAME["gptq-3"]
    meant = write(writer, plain, tmp_path)
    biases = {
        name.removesuffix("qweight") + "bias": torch.zeros(tensor.shape[1])
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
        if name.endswith("qweight")
    }
    assert len(biases) == 14
    change(tmp_path, **biases)
    assert error(generate(tmp_path, dtype="float32"), reference(tmp_path, meant, writer)) < EXACT
    biases["model.layers.1.mlp.up_proj.bias"][3] = 0.5
    change(tmp_path, **biases)
    with pytest.raises(CheckpointError, match=r"^model\.layers\.1\.mlp\.up_proj\.bias is not zero, but"):
        generate(tmp_path)


def test_plain_checkpoints_may_not_have_them(plain: Path, tmp_path: Path) -> None:
    for file in plain.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    change(tmp_path, **{"model.layers.1.mlp.up_proj.bias": torch.zeros(128)})
    with pytest.raises(CheckpointError, match=r"read by no layer: model\.layers\.1\.mlp\.up_proj\.bias"):
        generate(tmp_path)
    change(
        tmp_path, **{"model.layers.1.mlp.up_proj.bias": None, "model.layers.1.mlp.up_proj.weight_scale": torch.ones(1)}
    )
    with pytest.raises(CheckpointError, match=r"does config.json say how the checkpoint is quantized\?"):
        generate(tmp_path)


# --- errors


@pytest.mark.parametrize(
    ("name", "tensor"), [("gptq-3", "scales"), ("ct-mxfp4", "weight_scale"), ("ct-nvfp4", "weight_global_scale")]
)
def test_missing_and_extra_scales_are_one_line(name: str, tensor: str, plain: Path, tmp_path: Path) -> None:
    write(BY_NAME[name], plain, tmp_path)
    missing, extra = f"model.layers.1.mlp.up_proj.{tensor}", "model.layers.0.mlp.up_proj.weight_scale_3"
    change(tmp_path, **{missing: None, extra: torch.ones(1)})
    with pytest.raises(CheckpointError) as failed:
        generate(tmp_path)
    message = str(failed.value)
    assert "\n" not in message and missing in message and extra in message


@pytest.mark.parametrize("group_size", [40, 24])
def test_odd_group_sizes_are_one_line(group_size: int, plain: Path, tmp_path: Path) -> None:
    writer = BY_NAME["gptq-3"]
    write(Writer("odd", writer.config | {"group_size": group_size}, writer.linear), plain, tmp_path)
    with pytest.raises(CheckpointError, match=rf"q_proj\.qzeros.* for every {group_size} input features") as failed:
        generate(tmp_path)
    assert "\n" not in str(failed.value)


def test_order_that_was_not_declared(plain: Path, tmp_path: Path) -> None:
    """desc_act says no, g_idx says yes: the tensor is believed."""
    writer = BY_NAME["gptq-4-order"]
    changed = Writer("order", writer.config | {"desc_act": False}, writer.linear)
    meant = write(changed, plain, tmp_path)
    assert error(generate(tmp_path), reference(tmp_path, meant, changed)) < HELD


# --- quantization at load time


NEAR = {"fp8": 0.3, "int8": 0.1, "int4": 0.8, "nvfp4": 0.9, "mxfp4": 1.1}
"""Eight times the relative error of such a weight, and more for rounded activations."""


def test_names_agree() -> None:
    assert list(FORMATS) == list(AT_LOAD)


@pytest.mark.parametrize("name", AT_LOAD)
def test_plain_checkpoints_become(name: str, plain: Path) -> None:
    """The whole way from the flag; logits stay near, and the memory plan counts what is kept."""
    model = reference(plain, dict(load_file(plain / "model.safetensors")), Writer("plain", {}, BY_NAME["awq"].linear))
    for dtype in ("float32", "auto"):
        found = generate(plain, quantization=name, dtype=dtype)
        assert 1e-3 < error(found, model) < NEAR[name]
    if library.find() is not None:
        blocks = {"int8": "14 Q8_0", "int4": "14 Q4_0", "mxfp4": "14 Q5_0"}.get(name, "16 BF16")
        assert any(f"weights: {blocks}" in line for line in found[2])
        assert any("no smaller than plain weights" in line for line in found[2]) == (blocks == "16 BF16")


def test_what_a_checkpoint_left_plain_becomes(plain: Path, tmp_path: Path) -> None:
    """Attention of the first layer is plain in this one."""
    meant = write(BY_NAME["mxfp4"], plain, tmp_path)
    found = generate(tmp_path, quantization="int8")
    assert error(found, reference(tmp_path, meant, BY_NAME["mxfp4"])) < HELD
    if library.find() is not None:
        assert any("10 Q5_0, 4 Q8_0, 2 BF16" in line for line in found[2])


def test_the_name_of_the_checkpoint_may_be_said(plain: Path, tmp_path: Path) -> None:
    write(BY_NAME["gptq-3"], plain, tmp_path)
    own = generate(tmp_path)
    for name in ("gptq", "gptq_marlin"):
        assert generate(tmp_path, quantization=name)[0] == own[0]
    for name in ("awq", "modelopt", "int3"):
        with pytest.raises(ConfigError, match=f"--quantization {name}: .* is quantized as gptq; leave the flag out"):
            generate(tmp_path, quantization=name)
    with pytest.raises(ConfigError, match=r"--quantization gptq: .* is plain; leave the flag out or .* int8"):
        generate(plain, quantization="gptq")


# --- made-up weights


@pytest.mark.parametrize("name", BY_NAME)
def test_dummy_weights(name: str, plain: Path, tmp_path: Path) -> None:
    """Every format takes weights of no meaning, and gives finite logits with them."""
    config = json.loads((plain / "config.json").read_text())
    for file in plain.glob("*token*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    declared: Mapping[str, Any] = BY_NAME[name].config
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": declared}))
    for dtype in ("float32", "auto"):
        _, rows, _ = generate(tmp_path, load_format="dummy", dtype=dtype)
        assert bool(rows.isfinite().all()) and float(rows.std()) > 0
