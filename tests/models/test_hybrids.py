"""Families with recurrent layers: checkpoints on disk as published, spellings of config.json, states, and single tokens."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.errors import CheckpointError
from samovar.layers import Layer, bind
from samovar.layers.state_space import GatedRMSNorm
from samovar.models.hybrid import ATTENTION, RECURRENT, HybridConfig, HybridMixtureConfig
from samovar.models.registry import build, resolve
from samovar.parallel.mesh import Axis
from tests.models.family_table import FAMILIES
from tests.models.paged_run import PagedRun, load, placement
from tests.models.test_mixtures import logits_of
from tests.models.transformers_oracle import oracle, tokens

EXPECTED = {
    "lfm2": "model.layers.0.conv.conv.weight",
    "lfm2-moe": "model.layers.1.feed_forward.expert_bias",
    "mamba2": "backbone.layers.0.mixer.dt_bias",
    "granite4": "model.layers.0.shared_mlp.input_linear.weight",
    "bamba": "model.layers.1.self_attn.q_proj.weight",
    "nemotron-h-moe": "backbone.layers.1.mixer.experts.3.up_proj.weight",
    "falcon-h1": "model.layers.0.feed_forward.gate_proj.weight",
    "mamba": "backbone.layers.0.mixer.x_proj.weight",
    "falcon-mamba": "backbone.norm_f.weight",
    "jamba": "model.layers.1.feed_forward.router.weight",
}
"""One name each that published checkpoints have."""

NANO_9B = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"


@pytest.mark.parametrize("name", EXPECTED)
def test_a_published_checkpoint_is_read(name: str, tmp_path: Path) -> None:
    subject, ids = oracle(name), tokens(15, 80)
    subject.model.save_pretrained(tmp_path)
    assert EXPECTED[name] in load_file(tmp_path / "model.safetensors")
    assert float((logits_of(tmp_path, ids) - subject.logits(ids)).abs().max()) < 1e-4


def test_layers_of_nemotron_that_guess_further_tokens_are_left_unread(tmp_path: Path) -> None:
    subject, ids = oracle("nemotron-h"), tokens(9, 80)
    subject.model.save_pretrained(tmp_path)
    extra = {"mtp.layers.0.norm.weight": torch.ones(4)}
    save_file({**load_file(tmp_path / "model.safetensors"), **extra}, tmp_path / "model.safetensors")
    assert float((logits_of(tmp_path, ids) - subject.logits(ids)).abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "mamba", "falcon-h1", "nemotron-h"])
def test_tokens_one_by_one_are_the_whole_prompt(name: str) -> None:
    """Steps in which every sequence has one token take another way through each op."""
    subject, ids = oracle(name), [tokens(19, seed) for seed in (1, 2, 3)]
    run = PagedRun(load(subject.family.architecture, subject.raw, subject.tensors), TorchSdpaAttention())
    streams, found = [run.stream(19) for _ in ids], list[list[torch.Tensor]]()
    for at in range(19):
        found.append(run.step([(stream, mine[at : at + 1]) for stream, mine in zip(streams, ids)]))
    for mine, logits in zip(ids, zip(*found)):
        assert float((torch.cat(logits) - subject.logits(mine)).abs().max()) < 1e-4


@pytest.mark.parametrize("name", [family.name for family in FAMILIES if family.has_state])
def test_a_sequence_leaves_the_states_of_others_alone(name: str) -> None:
    """All rows but its own are as they were, in every recurrent layer; its own has changed in each."""
    subject = oracle(name)
    run = PagedRun(load(subject.family.architecture, subject.raw, subject.tensors), TorchSdpaAttention(), num_blocks=8)
    assert run.recurrent and len(run.model.state_specs()) == len(run.recurrent)
    stream = run.stream(6)
    for layer in run.recurrent:
        for tensor, spec in zip(layer.state, layer.state_spec().tensors, strict=True):
            assert spec.nbytes == tensor[0].nbytes
            tensor[torch.arange(8) != stream.row] = 7
    before = [tensor.clone() for layer in run.recurrent for tensor in layer.state]
    for ids in (tokens(5, 1), tokens(1, 2)):
        run.step([(stream, ids)])
    for old, new in zip(before, (tensor for layer in run.recurrent for tensor in layer.state)):
        changed = (old != new).flatten(1).any(1).nonzero().flatten().tolist()
        assert changed == [stream.row]


@pytest.mark.parametrize("name", ["lfm2", "mamba2", "granite4-dense", "mamba"])
def test_bfloat16_stays_near_float32(name: str) -> None:
    """Weights, activations and inputs of convolutions in 16 bits; states of scans stay float32."""
    subject, ids = oracle(name), tokens(20, 50)
    model = load(subject.family.architecture, subject.raw, subject.tensors, dtype=torch.bfloat16)
    run = PagedRun(model, TorchSdpaAttention(), cache_dtype=torch.bfloat16)
    kinds = {spec.name: spec.dtype for layer in run.recurrent for spec in layer.state_spec().tensors}
    assert kinds.get("inputs", "bfloat16") == "bfloat16" and kinds.get("scan", "float32") == "float32"
    stream = run.stream(20)
    logits = torch.cat([*run.step([(stream, ids[:12])]), *run.step([(stream, ids[12:])])])
    expected = subject.logits(ids)
    assert float((logits - expected).abs().mean()) < 0.05 * float(expected.abs().mean())


def kinds_of(architecture: str, raw: dict[str, Any]) -> tuple[str, ...]:
    config = resolve(architecture).read_config(raw)
    assert isinstance(config, (HybridConfig, HybridMixtureConfig))
    return config.mixers


def test_kinds_of_layers_may_be_spelled_in_several_ways() -> None:
    """As lists of old and new names, as letters, as indices."""
    raw = oracle("nemotron-h").raw
    letters = kinds_of("NemotronHForCausalLM", {**raw, "layers_block_type": None, "hybrid_override_pattern": NANO_9B})
    assert len(letters) == 56 and letters[14] == ATTENTION and letters.count(RECURRENT) == 27
    for names in (["mamba", "moe", "attention", "mlp"], ["linear_attention", "moe", "full_attention", "mlp"]):
        assert kinds_of("NemotronHForCausalLM", {**raw, "layers_block_type": names}) == (
            RECURRENT,
            "moe",
            ATTENTION,
            "mlp",
        )
    granite = oracle("granite4").raw
    for names in (["mamba", "attention", "mamba"], ["linear_attention", "full_attention", "linear_attention"]):
        found = kinds_of("GraniteMoeHybridForCausalLM", {**granite, "layer_types": names})
        assert found == (RECURRENT, ATTENTION, RECURRENT)
    assert kinds_of("BambaForCausalLM", {**oracle("bamba").raw, "attn_layer_indices": [0, 2]}).count(ATTENTION) == 2


@pytest.mark.parametrize(
    ("architecture", "row", "fields", "words"),
    [
        (
            "NemotronHForCausalLM",
            "nemotron-h",
            {"layers_block_type": ["mamba", "window"]},
            "kinds of layers must be 2 of",
        ),
        ("NemotronHForCausalLM", "nemotron-h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act must be relu2, got 'silu'"),
        ("BambaForCausalLM", "bamba", {"mamba_d_head": 7}, "mamba_n_heads 4 \\* mamba_d_head 7 is not 128"),
        ("BambaForCausalLM", "bamba", {"time_step_limit": [0.1]}, "time_step_limit must be two numbers"),
        ("FalconH1ForCausalLM", "falcon-h1", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be 5 numbers"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(architecture: str, row: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        resolve(architecture).read_config({**oracle(row).raw, **fields})


def test_an_infinite_step_is_read_as_written_by_transformers() -> None:
    raw = json.loads(oracle("mamba2").model.config.to_json_string())
    assert raw["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    config = resolve("Mamba2ForCausalLM").read_config(raw)
    assert isinstance(config, HybridConfig) and config.state_space.step_limit == (0.0, float("inf"))


_HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072}
PUBLISHED: list[tuple[str, float, int, int, dict[str, Any]]] = [
    (
        "NemotronHForCausalLM", 8.89, 27, 4,
        {**_HEADS, "num_attention_heads": 40, "hidden_size": 4480, "vocab_size": 131072, "intermediate_size": 15680,
         "mamba_head_dim": 80, "hybrid_override_pattern": NANO_9B},
    ),
    (
        "GraniteMoeHybridForCausalLM", 6.94, 36, 4,
        {**_HEADS, "num_attention_heads": 12, "num_key_value_heads": 4, "hidden_size": 1536, "vocab_size": 100352,
         "intermediate_size": 512, "shared_intermediate_size": 1024, "num_local_experts": 64, "num_experts_per_tok": 6,
         "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128, "num_hidden_layers": 40, "rms_norm_eps": 1e-5,
         "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 4, "tie_word_embeddings": True},
    ),
    (
        "Lfm2ForCausalLM", 1.17, 10, 6,
        {**_HEADS, "hidden_size": 2048, "vocab_size": 65536, "block_ff_dim": 12288, "num_hidden_layers": 16,
         "full_attn_idxs": [2, 5, 8, 10, 12, 14], "tie_embedding": True},
    ),
    (
        "Mamba2ForCausalLM", 7.29, 64, 0,
        {"hidden_size": 4096, "vocab_size": 32768, "num_hidden_layers": 64},
    ),
    (
        "MambaForCausalLM", 0.13, 24, 0,
        {"hidden_size": 768, "vocab_size": 50280, "intermediate_size": 1536, "num_hidden_layers": 24},
    ),
]  # fmt: skip
"""Architecture, billions of parameters, layers with a state and with attention of: Nemotron Nano 9B v2, Granite 4.0 H Tiny,
LFM2 1.2B, Codestral Mamba 7B, Mamba 130M; and fields of their config.json."""


@pytest.mark.parametrize(
    ("architecture", "billions", "recurrent", "attention", "raw"), PUBLISHED, ids=lambda x: str(x)[:12]
)
def test_published_models_have_their_size(
    architecture: str, billions: float, recurrent: int, attention: int, raw: dict[str, Any]
) -> None:
    """Every weight of 16 bits is there once, without memory for any."""
    model = build(architecture, raw)
    bind(model, replace(placement(torch.bfloat16), device=torch.device("meta")))
    size = sum(layer.resident_bytes() for layer in model.modules() if isinstance(layer, Layer))
    assert round(size / 2e9, 2) == billions
    kinds = [spec.tensors[0].name for spec in model.state_specs()]
    assert (len(model.cache_specs()), kinds.count("scan") or kinds.count("inputs")) == (attention, recurrent)


class Summing(Axis):
    """The first of two ranks, which adds what the other one has."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.other  # type: ignore[attr-defined,no-any-return]


@pytest.mark.parametrize("gates_last", [False, True])
def test_a_norm_whose_group_is_spread_over_ranks_is_that_of_one(gates_last: bool) -> None:
    """Bamba and Granite have one group: no rank has all of it."""
    torch.manual_seed(0)
    y, gate, weight = torch.randn(5, 12), torch.randn(5, 12), torch.randn(12)
    results = []
    for axis, columns in ((Axis(), slice(0, 12)), (Summing(0, 2), slice(0, 6))):
        norm = GatedRMSNorm(12, 1, 1e-5, gates_last=gates_last)
        norm.bind(placement(tp=axis))
        norm.weight.copy_(weight[columns])
        if isinstance(axis, Summing):
            rest = y[:, 6:] if gates_last else y[:, 6:] * torch.nn.functional.silu(gate[:, 6:])
            object.__setattr__(axis, "other", rest.square().sum(-1, keepdim=True))
        results.append(norm(y[:, columns], gate[:, columns]))
    torch.testing.assert_close(results[1], results[0][:, :6])
