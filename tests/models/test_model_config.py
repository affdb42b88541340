"""config.json reading: typed, complete, and strict about what would change the mathematics."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from samovar.errors import CheckpointError
from samovar.layers import Rope, RopeParameters, bind
from samovar.models.config import DecoderConfig
from samovar.models.registry import ARCHITECTURES, build, resolve
from samovar.models.smollm3 import SmolLM3Config
from samovar.quant.select import select
from samovar.quant.unquantized import Unquantized
from tests.models.family import SMALL
from tests.models.family_table import FAMILIES
from tests.models.paged_run import placement

OPTIONAL = [
    "layer_types",
    "rope_parameters",
    "rope_theta",
    "rope_scaling",
    "head_dim",
    "no_rope_layers",
    "no_rope_layer_interval",
    "max_window_layers",
    "use_sliding_window",
    "sliding_window",
    "sliding_window_pattern",
    "rope_local_base_freq",
    "hidden_activation",
    "hidden_act",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "attention_bias",
    "mlp_bias",
    "original_max_position_embeddings",
    "partial_rotary_factor",
]
RAW: dict[str, Any] = {**SMALL, "rms_norm_eps": 1e-6}


@pytest.mark.parametrize(
    "name",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "rms_norm_eps",
        "max_position_embeddings",
    ],
)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(CheckpointError, match=name):
        DecoderConfig.from_hf({field: value for field, value in RAW.items() if field != name})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", -2),
        ("vocab_size", 1.5),
        ("rms_norm_eps", "small"),
        ("tie_word_embeddings", "yes"),
        ("attention_bias", 1),
        ("head_dim", True),
        ("sliding_window", -1),
        ("layer_types", "full_attention"),
        ("query_pre_attn_scalar", 0),
        ("num_hidden_layers", 10**30),
        ("head_dim", 2**31),
        ("hidden_size", 2**63),
        ("vocab_size", 2**40),
        ("rms_norm_eps", 10**19),
    ],
)
def test_a_field_of_the_wrong_kind_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises(CheckpointError, match=f"{field} must be .*{value!r}"):
        DecoderConfig.from_hf({**RAW, field: value})


def test_what_no_family_implements_is_refused_by_name() -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "rope_type 'spiral'"),
        ({"rope_scaling": {"type": "mrope"}}, "rope_type 'mrope'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "needs low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "needs factor"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries for 3 layers"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "chunked_attention"),
        ({"num_key_value_heads": 3}, "not a multiple"),
    ]
    for fields, message in cases:
        with pytest.raises(CheckpointError, match=message):
            DecoderConfig.from_hf({**RAW, **fields})
    with pytest.raises(CheckpointError, match="activation 'relu2'"):
        build("LlamaForCausalLM", {**RAW, "hidden_act": "relu2"})
    with pytest.raises(CheckpointError, match="8 factors for 4 rotated pairs"):
        rope = {"short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "original_max_position_embeddings": 16}
        raw = {**RAW, "head_dim": 8, "rope_scaling": {"type": "longrope", **rope}}
        bind(build("LlamaForCausalLM", raw), placement())


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_damaged_files_are_one_line_errors(architecture: str) -> None:
    """Whatever a field holds, reading fails with `CheckpointError` or gives a config: never with another error."""
    row = next(family for family in FAMILIES if family.architecture == architecture)
    good = {**row.raw, "rms_norm_eps": 1e-6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    junk = (None, -1, 0, "x", [], {}, [None], {"a": 1}, True, 1.5, {"rope_type": "linear", "factor": "2"})
    family, refused = resolve(architecture), 0
    for name in (*good, *OPTIONAL):
        for value in junk:
            try:
                family(family.read_config({**good, name: value}))
            except CheckpointError as error:
                refused += 1
                assert "\n" not in str(error)
        if name in good:
            with contextlib.suppress(CheckpointError):
                family.read_config({key: value for key, value in good.items() if key != name})
    assert refused > 50


def test_unknown_architectures_are_refused_with_what_there_is() -> None:
    for name in ("LlamaForSequenceClassification", "os:system", ""):
        with pytest.raises(CheckpointError, match=f"{name!r} is not supported; there are [A-Z]"):
            resolve(name)


def test_quantized_checkpoints_are_refused_by_name() -> None:
    kernels = placement().kernels
    assert isinstance(select(None, torch.float32, kernels)("model.layers.0.mlp.down_proj"), Unquantized)
    for config in ({"quant_method": "exl2", "bits": 4}, {"quant_method": "hqq"}, {"bits": 4}):
        with pytest.raises(CheckpointError, match=f"{config.get('quant_method', 'unnamed')}.*not supported"):
            select(config, torch.float32, kernels)


def test_older_files_mean_what_they_meant() -> None:
    """Fields of config.json files written before rope_parameters and layer_types existed."""
    llama = DecoderConfig.from_hf({**RAW, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert llama.rope_of(0) == RopeParameters(
        rope_type="linear", rope_theta=5e5, factor=2.0, max_position_embeddings=96
    )
    plain = {name: value for name, value in RAW.items() if name not in ("num_key_value_heads", "tie_word_embeddings")}
    assert DecoderConfig.from_hf(plain).num_key_value_heads == 4
    gemma = {**plain, "num_hidden_layers": 7, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window": 9}
    read = resolve("Gemma3ForCausalLM").read_config({**gemma, "sliding_window_pattern": 3})
    assert [read.window_of(i) for i in range(7)] == [9, 9, None, 9, 9, None, 9]
    assert (read.rope_of(0).rope_theta, read.rope_of(2).rope_theta) == (1e4, 1e6)
    assert read.tie_word_embeddings and read.hidden_act == "gelu_pytorch_tanh" and read.head_dim == 256
    phi = {**RAW, "rope_scaling": {"type": "su", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}}
    assert resolve("Phi3ForCausalLM").read_config(phi).rope_of(0).rope_type == "longrope"
    smol = resolve("SmolLM3ForCausalLM").read_config({**RAW, "num_hidden_layers": 5})
    assert isinstance(smol, SmolLM3Config) and smol.no_rope_layers == (1, 1, 1, 0, 1)
    assert smol.rope_of(0).rope_theta == 2e6


def test_a_window_counts_only_where_the_family_slides() -> None:
    assert resolve("LlamaForCausalLM").read_config({**RAW, "sliding_window": 5}).window_of(0) is None
    assert resolve("MistralForCausalLM").read_config(RAW).window_of(0) == 4096
    assert resolve("MistralForCausalLM").read_config({**RAW, "sliding_window": None}).window_of(0) is None
    assert resolve("Qwen2ForCausalLM").read_config({**RAW, "sliding_window": 5}).window_of(2) is None


def test_rope_tables_are_made_once_per_step_and_parameter_set() -> None:
    """Gemma 3 has two thetas over seven layers: two tables."""
    row = next(family for family in FAMILIES if family.name == "gemma3")
    raw = {**row.raw, "rms_norm_eps": 1e-6}
    model = build("Gemma3ForCausalLM", raw)
    bind(model, placement())
    keys = [layer.key for layer in model.modules() if isinstance(layer, Rope)]
    assert len(keys) == 7 and len(set(keys)) == 2


def test_every_rope_field_that_was_given_is_read_or_refused() -> None:
    """A scaling whose fields have no effect would be a silent default: each required field changes the result."""
    base: dict[str, dict[str, Any]] = {
        "linear": {"factor": 2.0},
        "dynamic": {"factor": 2.0},
        "llama3": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096, "beta_fast": 20.0, "beta_slow": 2.0},
        "proportional": {"factor": 2.0, "partial_rotary_factor": 0.3},
    }
    for kind, fields in base.items():

        def table(kind: str = kind, **changed: Any) -> tuple[list[float], float]:
            layer = Rope(32, RopeParameters(rope_type=kind, max_position_embeddings=64, **changed))
            layer.bind(placement(max_model_len=200))
            return layer.per_position.tolist(), layer.key.magnitude

        for name, value in fields.items():
            assert table(**fields) != table(**{**fields, name: value * 2.5}), (kind, name)
