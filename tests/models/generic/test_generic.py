"""The generic path: architectures of every kind against Transformers, and what is refused with its reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError
from samovar.layers import bind
from samovar.layers.attention import attention_layers
from samovar.models.generic.experts import GenericExperts
from samovar.models.generic.held import Held
from samovar.models.generic.layers import GenericEmbedding, GenericHead, GenericLinear
from samovar.models.generic.model import GenericLM
from samovar.models.registry import ARCHITECTURES, build
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import fill_dummy, load_weights
from samovar.weights.plan import layers_of
from tests.models.generic.gate import check, reference_of, subject
from tests.models.generic.small_configs import small_config
from tests.models.paged_run import placement

QUICK = {
    "GPT2LMHeadModel": "gpt2",  # inputs before outputs in every matrix, learned positions
    "GPTNeoXForCausalLM": "gpt_neox",  # parallel branches, a head of another name
    "OPTForCausalLM": "opt",  # a head that reaches through the body
    "StableLmForCausalLM": "stablelm",
    "OlmoForCausalLM": "olmo",  # norms without weights
    "PhiForCausalLM": "phi",  # a head with a bias
    "Gemma2ForCausalLM": "gemma2",  # soft caps, windows in turns
    "DeepseekV3ForCausalLM": "deepseek_v3",  # values narrower than keys, experts merged by Transformers
    "GptOssForCausalLM": "gpt_oss",  # sinks, experts that stay Transformers'
    "Llama4ForCausalLM": "llama4_text",  # chunked attention
    "DiffLlamaForCausalLM": "diffllama",  # a layer that attends twice
    "RobertaForCausalLM": "roberta",  # positions behind that of padding, a tied head with a bias
    "AriaTextForCausalLM": "aria_text",  # stacked experts, inputs before outputs
}


@pytest.mark.parametrize("architecture", QUICK)
def test_results_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    seed = 1 if architecture == "AriaTextForCausalLM" else 0  # with 0 a router sees two experts as good as equal
    check(subject(reference_of(QUICK[architecture], architecture, seed=seed), tmp_path))


def generic(model_type: str, architecture: str, **fields: Any) -> GenericLM:
    """A model that is declared, and no more."""
    raw = {**small_config(model_type, fields).to_dict(), "architectures": [architecture]}
    return GenericLM(architecture, raw)


def test_modules_become_layers_and_no_tensor_is_left_out() -> None:
    model = generic("mixtral", "MixtralForCausalLM")
    kinds = [type(layer) for layer in layers_of(model)]
    assert kinds.count(GenericLinear) == 4 * 3
    assert kinds.count(GenericExperts) == 3
    assert (kinds.count(GenericEmbedding), kinds.count(GenericHead)) == (1, 1)
    bind(model, placement())
    names = {source.name for layer in layers_of(model) for source in layer.sources()}
    assert "model.layers.2.block_sparse_moe.experts.3.w2.weight" in names  # as Mixtral's files are, not as its class is
    assert "model.layers.0.block_sparse_moe.gate.weight" in names
    sizes = sum(layer.resident_bytes() for layer in layers_of(model))
    reference = reference_of("mixtral", "MixtralForCausalLM")
    assert sizes == sum(parameter.nbytes for parameter in reference.parameters())


def test_windows_chunks_caps_and_sinks_are_found() -> None:
    gemma = attention_layers(generic("gemma2", "Gemma2ForCausalLM"))
    assert [layer.declared.window for layer in gemma] == [7, None, 7]
    assert {layer.declared.softcap for layer in gemma} == {5.0}
    llama4 = generic("llama4_text", "Llama4ForCausalLM", num_hidden_layers=4)
    assert [layer.declared.chunk for layer in attention_layers(llama4)] == [8, 8, 8, None]
    assert all(layer.has_sinks for layer in attention_layers(generic("gpt_oss", "GptOssForCausalLM")))


@pytest.mark.parametrize(
    ("model_type", "architecture", "fields", "reason"),
    [
        ("bert", "BertLMHeadModel", {"is_decoder": False}, "its attention is bidirectional"),
        ("bloom", "BloomForCausalLM", {}, "it counts positions by itself"),
        ("doge", "DogeForCausalLM", {}, "it makes an attention mask of its own"),
        ("falcon", "FalconForCausalLM", {}, "it does not use Transformers' interface"),
        ("lfm2", "Lfm2ForCausalLM", {}, "it has layers of the kind conv"),
        ("qwen3_next", "Qwen3NextForCausalLM", {}, "some of its layers have recurrent state"),
    ],
)
def test_what_would_be_wrong_is_refused(
    model_type: str, architecture: str, fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(CheckpointError, match=f"{architecture} cannot run through Transformers: .*{reason}"):
        generic(model_type, architecture, **fields)


def test_native_families_win(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {**small_config("llama").to_dict(), "architectures": ["LlamaForCausalLM"]}
    assert not isinstance(build("LlamaForCausalLM", raw), GenericLM)
    assert isinstance(build("LlamaForCausalLM", raw, "generic"), GenericLM)
    monkeypatch.delitem(ARCHITECTURES, "LlamaForCausalLM")
    assert isinstance(build("LlamaForCausalLM", raw), GenericLM)
    with pytest.raises(CheckpointError, match="'LlamaForCausalLM' is not supported; there are [A-Z]"):
        build("LlamaForCausalLM", raw, "native")


def test_an_untested_architecture_needs_to_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = {**small_config("gpt_neox").to_dict(), "architectures": ["GPTNeoXForCausalLM"]}
    monkeypatch.setattr("samovar.models.generic.verdicts.verdicts", dict)
    with pytest.raises(CheckpointError, match="'GPTNeoXForCausalLM' is not supported.*not tested.*--model-impl any"):
        build("GPTNeoXForCausalLM", raw)
    assert isinstance(build("GPTNeoXForCausalLM", raw, "any"), GenericLM)
    with pytest.raises(CheckpointError, match="Transformers .* has no NoSuchForCausalLM"):
        build("NoSuchForCausalLM", raw, "any")


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = small_config("gpt_neox").to_dict()
    monkeypatch.setattr("samovar.models.generic.declare.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"not installed: pip install 'samovar\[generic\]'"):
        GenericLM("GPTNeoXForCausalLM", raw)


def test_code_of_a_repository_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling.py").write_text("raise SystemExit('ran')")
    raw = small_config("gpt_neox").to_dict()
    model = GenericLM("GPTNeoXForCausalLM", {**raw, "auto_map": {"AutoModelForCausalLM": "modeling.Model"}})
    assert type(model.trunk[0]).__module__.startswith("transformers.models.gpt_neox")


def saved(folder: Path, change: Any) -> Path:
    """A checkpoint of GPT-2 whose tensors `change` has changed."""
    reference_of("gpt2", "GPT2LMHeadModel").save_pretrained(folder)
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})
    return folder


def load(folder: Path) -> GenericLM:
    description = describe(folder, ModelConfig(model=str(folder)))
    model = GenericLM(description.architecture, description.config)
    with open_checkpoint(description) as checkpoint:
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        bind(model, placement(stored_shapes=shapes))
        load_weights(model, checkpoint)
    return model


def test_a_checkpoint_of_a_body_alone_is_read(tmp_path: Path) -> None:
    """GPT-2's own files lack the "transformer." of every name, and hold masks."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        return {**found, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}

    model = load(saved(tmp_path, change))
    expected = reference_of("gpt2", "GPT2LMHeadModel").transformer.wte.weight
    table = next(layer for layer in layers_of(model) if isinstance(layer, GenericEmbedding))
    torch.testing.assert_close(table.weight, expected.detach(), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {n: v for n, v in t.items() if n != "transformer.ln_f.bias"}, "missing.*transformer.ln_f.bias"),
        (lambda t: {**t, "transformer.h.0.extra": torch.ones(2)}, "read by no layer.*transformer.h.0.extra"),
        (lambda t: {**t, "transformer.wpe.weight": torch.ones(5, 64)}, "transformer.wpe.weight .layer holds"),
    ],
)
def test_checkpoints_that_do_not_match_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(saved(tmp_path, change))


def test_numbers_that_are_computed_exist() -> None:
    """Frequencies of the rope are in no checkpoint; nothing of a bound model is without memory."""
    model = generic("llama", "LlamaForCausalLM")
    bind(model, placement())
    fill_dummy(model, 0)
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            assert tensor is None or tensor.device.type == "cpu", name
    frequencies = model.model.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies, 10000.0 ** -(torch.arange(0, 24, 2) / 24))


def test_every_layer_is_told_its_place() -> None:
    model = generic("phi", "PhiForCausalLM")
    bind(model, placement())
    assert all(layer.path for layer in layers_of(model))
    assert isinstance(model.lm_head, GenericLinear)
    assert model.lm_head.bias is not None
    held = [layer for layer in layers_of(model) if isinstance(layer, Held)]
    assert {path.rpartition(".")[2] for path in (layer.path for layer in held)} == {"samovar_tensors"}


def test_the_start_says_so() -> None:
    (line,) = generic("gpt_neox", "GPTNeoXForCausalLM").notes
    assert line.startswith("model: generic path: GPTNeoXForCausalLM of Transformers 5")
    assert "3 attention layers" in line


def test_config_with_infinite_numbers_is_read() -> None:
    """Transformers writes them as objects."""
    raw = json.loads(small_config("gpt_neox").to_json_string())
    GenericLM("GPTNeoXForCausalLM", {**raw, "unused": {"__float__": "Infinity"}})
