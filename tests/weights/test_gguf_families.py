"""GGUF == safetensors: for every family, a GGUF file gives the config and the tensors of the Transformers model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from samovar.config.checkpoint import describe
from samovar.config.description import ModelDescription
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError
from samovar.kernels.op import Kernels, Target
from samovar.layers.layer import Placement, bind
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.load import load_weights
from samovar.weights.plan import layers_of, weights_of
from tests.weights.gguf_files import MODEL_TYPES, tiny_model, write_gguf

SAME_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "mlp_bias", "sliding_window",
    "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "no_rope_layers",
    "hidden_act", "hidden_activation", "bos_token_id", "eos_token_id",
)  # fmt: skip


def loaded(description: ModelDescription, dtype: torch.dtype = torch.float32) -> DecoderLM:
    model = build(description.architecture, description.config)
    place = Placement(dtype=dtype, device=torch.device("cpu"), kernels=Kernels(Target("cpu", "", dtype), "cpu"))
    bind(model, place)
    with open_checkpoint(description) as checkpoint:
        load_weights(model, checkpoint)
    return model


def assert_same_weights(one: DecoderLM, other: DecoderLM, tolerance: float = 0.0) -> None:
    for a, b in zip(layers_of(one), layers_of(other), strict=True):
        for (name, x), (_, y) in zip(weights_of(a), weights_of(b), strict=True):
            torch.testing.assert_close(
                x, y, atol=tolerance, rtol=0, msg=lambda m, a=a, name=name: f"{a.path}.{name}: {m}"
            )


@pytest.mark.parametrize("name", MODEL_TYPES)
def test_family(name: str, tmp_path: Path) -> None:
    """B163: with and without output.weight. Names, values, config; then both formats loaded into our own model."""
    model = tiny_model(name)
    write_gguf(tmp_path / "tiny.gguf", model)
    description = describe(tmp_path / "tiny.gguf", ModelConfig())
    theirs = model.config.to_dict()
    ours = description.config
    assert description.architecture == type(model).__name__
    for field in SAME_FIELDS:
        if field in ours and theirs.get(field) is not None:
            assert ours[field] == theirs[field], field
    state = {k: v for k, v in model.state_dict().items() if not (k == "lm_head.weight" and ours["tie_word_embeddings"])}
    with open_checkpoint(description) as checkpoint:
        assert checkpoint.tensors.keys() == state.keys()
        for tensor_name, expected in state.items():
            got = checkpoint.read(tensor_name)
            torch.testing.assert_close(got, expected, atol=2e-7 if "gemma" in name else 0, rtol=0)
    assert description.num_parameters == sum(t.numel() for t in state.values())
    assert description.stored_bytes == 4 * description.num_parameters
    model.save_pretrained(tmp_path / "hf")
    other = describe(tmp_path / "hf", ModelConfig())
    assert (other.format, other.architecture) == ("safetensors", description.architecture)
    assert_same_weights(loaded(description), loaded(other), 2e-7 if "gemma" in name else 0.0)


def test_mistral_rope_and_window(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("mistral"))
    config = describe(tmp_path / "m.gguf", ModelConfig()).config
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 24)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quant", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_matrices_in_every_dtype(quant: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """What lands in a model is the package's dequantized value, un-permuted and rounded once."""
    model = tiny_model("llama")
    write_gguf(tmp_path / "q.gguf", model, quant=quant)
    state = model.state_dict()
    with open_checkpoint(describe(tmp_path / "q.gguf", ModelConfig())) as checkpoint:
        for name, tensor in state.items():
            target = torch.empty(tensor.shape, dtype=dtype)
            checkpoint.read_into(name, target)
            expected = tensor
            if tensor.dim() == 2:
                kind = gguf.GGMLQuantizationType[quant]
                # Rows are quantized independently, so their order in the file does not matter.
                stored = gguf.quants.quantize(tensor.numpy(), kind)
                expected = torch.from_numpy(gguf.quants.dequantize(stored, kind).astype(np.float32))
            assert torch.equal(target, expected.to(dtype)), name


@pytest.mark.parametrize("count", [1, 2, 4])
def test_shards_join_to_the_whole(count: int, tmp_path: Path) -> None:
    """B164: nothing here cares whether a size is a multiple of 64; rows and columns are cut where asked."""
    model = tiny_model("llama-tied", vocab_size=1001)
    write_gguf(tmp_path / "s.gguf", model, quant="Q8_0")
    description = describe(tmp_path / "s.gguf", ModelConfig())
    assert description.vocab_size == 1001
    loaded(description)
    with open_checkpoint(description) as checkpoint:
        whole = checkpoint.read("model.embed_tokens.weight")
        assert whole.shape == (1001, 64)
        if count > 1:
            with pytest.raises(CheckpointError, match="does not divide"):
                checkpoint.read("model.embed_tokens.weight", axis=0, shard=(0, count))
        for name, axis in (
            ("self_attn.q_proj", 0),
            ("self_attn.v_proj", 0),
            ("self_attn.o_proj", 1),
            ("mlp.down_proj", 1),
        ):
            full = f"model.layers.1.{name}.weight"
            parts = [checkpoint.read(full, axis=axis, shard=(i, count)) for i in range(count)]
            assert torch.equal(torch.cat(parts, dim=axis), checkpoint.read(full)), full


def test_half_a_head_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "s.gguf", tiny_model("llama"))
    checkpoint = open_checkpoint(describe(tmp_path / "s.gguf", ModelConfig()))
    with checkpoint, pytest.raises(CheckpointError, match="whole heads"):
        checkpoint.read("model.layers.0.self_attn.q_proj.weight", axis=0, shard=(0, 8))


def with_rope(tmp_path: Path, extra: dict[str, Any], tensors: dict[str, list[float]] | None = None) -> dict[str, Any]:
    path = tmp_path / "rope.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in {
        "context_length": 131072, "embedding_length": 64, "block_count": 1, "feed_forward_length": 8,
        "attention.head_count": 1, "vocab_size": 9,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 500000.0)
    for key, value in extra.items():
        {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}[type(value)](
            f"llama.rope.{key}", value
        )
    for name, values in (tensors or {}).items():
        writer.add_tensor(name, np.array(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return describe(path, ModelConfig()).config


def test_rope_scalings(tmp_path: Path) -> None:
    assert "rope_scaling" not in with_rope(tmp_path, {})
    assert with_rope(tmp_path, {})["rope_theta"] == 500000.0
    linear = with_rope(tmp_path, {"scaling.type": "linear", "scaling.factor": 4.0})
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert with_rope(tmp_path, {"scale_linear": 2.0})["rope_scaling"]["factor"] == 2.0
    yarn = {
        "scaling.type": "yarn",
        "scaling.factor": 4.0,
        "scaling.original_context_length": 32768,
        "scaling.yarn_beta_fast": 16.0,
    }
    assert with_rope(tmp_path, yarn)["rope_scaling"] == {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "beta_fast": 16.0,
    }  # fmt: skip
    assert with_rope(tmp_path, {"dimension_count": 48})["partial_rotary_factor"] == 0.75
    with pytest.raises(CheckpointError, match="'dynamic'"):
        with_rope(tmp_path, {"scaling.type": "dynamic", "scaling.factor": 4.0})


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_rope_is_recognised_from_its_factors(factor: float, tmp_path: Path) -> None:
    """The factors are made by Transformers' own rule; the rule must come back, exactly."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, max_position_embeddings=131072, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 500000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    got = with_rope(tmp_path, {}, {"rope_freqs.weight": (plain / scaled.double()).tolist()})
    assert {k: v for k, v in rope.items() if k != "rope_theta"} == got["rope_scaling"]


def test_other_frequency_factors_are_kept_as_they_are(tmp_path: Path) -> None:
    factors = [1.0 + i / 8 for i in range(32)]
    scaling = with_rope(tmp_path, {}, {"rope_freqs.weight": factors})["rope_scaling"]
    assert scaling["rope_type"] == "longrope" and scaling["attention_factor"] == 1.0
    assert scaling["short_factor"] == scaling["long_factor"] == factors
    assert "rope_scaling" not in with_rope(tmp_path, {}, {"rope_freqs.weight": [1.0] * 32})
    with pytest.raises(CheckpointError, match="31 rotary factors"):
        with_rope(tmp_path, {}, {"rope_freqs.weight": factors[:-1]})
    with pytest.raises(CheckpointError, match="not positive"):
        with_rope(tmp_path, {}, {"rope_freqs.weight": [float("nan")] * 32})


def test_longrope(tmp_path: Path) -> None:
    long, short = [2.0 + i for i in range(32)], [1.0] * 32
    tensors = {"rope_factors_long.weight": long, "rope_factors_short.weight": short}
    extra = {"scaling.original_context_length": 4096, "scaling.attn_factor": 1.25}
    assert with_rope(tmp_path, extra, tensors)["rope_scaling"] == {
        "rope_type": "longrope", "long_factor": long, "short_factor": short, "factor": 32.0, "attention_factor": 1.25,
        "original_max_position_embeddings": 4096,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"general.architecture": "falcon"}, "'falcon' is not supported"),
        ({"llama.expert_count": 8}, "expert"),
        ({"llama.attention.key_length": 32}, "32 and values 16"),
    ],
)
def test_models_the_tables_cannot_express(extra: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(str(path), extra.get("general.architecture", "llama"))
    settings: dict[str, Any] = {
        "llama.context_length": 64, "llama.embedding_length": 64, "llama.block_count": 1, "llama.vocab_size": 9,
        "llama.feed_forward_length": 8, "llama.attention.head_count": 4, "llama.attention.value_length": 16,
    } | {k: v for k, v in extra.items() if k != "general.architecture"}  # fmt: skip
    for key, value in settings.items():
        writer.add_uint32(key, value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=message):
        describe(path, ModelConfig())


def test_end_ids_are_found_by_text_and_kind(tmp_path: Path) -> None:
    """Control tokens only: an ordinary token that happens to read <|end|> must not stop anything."""
    path = tmp_path / "ends.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in {
        "context_length": 64, "embedding_length": 64, "block_count": 1, "feed_forward_length": 8,
        "attention.head_count": 4, "vocab_size": 6,
    }.items():  # fmt: skip
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_token_list(["a", "</s>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|eot_id|>x"])
    writer.add_token_types([1, 3, 3, 1, 3, 3])
    writer.add_eos_token_id(1)
    writer.add_float32("general.sampling.temp", 0.7)
    writer.add_int32("general.sampling.top_k", 20)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    description = describe(path, ModelConfig(override_generation_config={"top_k": 5}))
    assert description.eos_token_ids == (1, 2, 4)
    assert description.generation_config == {"temperature": 0.7, "top_k": 5}
    assert describe(path, ModelConfig(generation_config="vllm")).generation_config == {}
