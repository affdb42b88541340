"""Which linears config.json says are quantized, and how; what it may not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError
from samovar.layers import ColumnLinear, Embedding, LMHead, QKVLinear
from samovar.quant.awq import AWQScheme
from samovar.quant.fp8 import FP8Scheme
from samovar.quant.gptq import GPTQScheme
from samovar.quant.mixed import Mixed
from samovar.quant.mxfp4 import QUARK
from samovar.quant.nvfp4 import MODELOPT
from samovar.quant.packed_int import PackedInt, PackedIntScheme
from samovar.quant.select import read, select
from samovar.quant.unquantized import Unquantized
from samovar.quant.whole_int import IntScheme
from tests.models.paged_run import placement
from tests.quant.writers import BY_NAME, INT4, compressed, numbers

ATTENTION, MLP = "model.layers.0.self_attn.q_proj", "model.layers.11.mlp.up_proj"


def refused(config: dict[str, Any] | str) -> str:
    with pytest.raises(CheckpointError) as error:
        read(config)(MLP)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", BY_NAME)
def test_heads_and_embeddings_stay_plain(name: str) -> None:
    quant_for = select(BY_NAME[name].config, torch.float32, placement().kernels)
    assert isinstance(quant_for("lm_head"), Unquantized) and isinstance(quant_for("model.embed_tokens"), Unquantized)


def test_nothing_stored_is_plain() -> None:
    nothing: list[dict[str, Any] | str | None] = [None, {}, ""]
    for stored in nothing:
        assert isinstance(select(stored, torch.float32, placement().kernels)("model.layers.0.mlp.up_proj"), Unquantized)


# --- formats that nothing here can compute


@pytest.mark.parametrize("method", ["exl2", "hqq", "aqlm", "vptq", "fbgemm_fp8", "higgs", "eetq", "quanto", "spqr"])
def test_unknown_formats_are_refused_by_name(method: str) -> None:
    assert f"quantized as '{method}'" in refused({"quant_method": method})
    assert f"quantized as '{method}'" in refused(method)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptq", "bits": 5, "group_size": 32}, "bits 5 is not supported"),
        ({"quant_method": "gptq", "bits": 4}, "group_size None must be an integer"),
        ({"quant_method": "gptq", "bits": "4", "group_size": 32}, "bits '4' must be an integer"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0 must be positive"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'"),
        ({"quant_method": "awq", "bits": 8, "group_size": 32}, "bits 8 is not supported"),
        ({"quant_method": "awq", "w_bit": 3, "q_group_size": 32}, "w_bit 3 is not supported"),
        ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "fp8", "activation_scheme": "odd"}, "activation_scheme 'odd'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128] must be two"),
        ({"quant_method": "fp8", "weight_block_size": [1, 1], "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "bitsandbytes"}, "load_in_4bit None and load_in_8bit are both unset"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "modelopt"}, "quant_algo None"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 32}, "group_size 32"),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "quant_type 'int4_weight_only' must be an object"),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig"}}},
            "_type 'Int4WeightOnlyConfig'",
        ),
        (
            {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {"group_size": 32}}}},
            "group_size 32",
        ),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "data_type": "mx_fp"}, "data_type 'mx_fp'"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "act_bits": 8}, "act_bits 8"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32, "packing_format": "llm_compressor"}, "packing_format"),
        (
            {"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "uint4", "qscheme": "per_group"}}},
            "dtype 'uint4'",
        ),
        (compressed("marlin-24", INT4), "format 'marlin-24'"),
        (compressed("sparse-24-bitmask", INT4), "format 'sparse-24-bitmask'"),
        (compressed("int-quantized", INT4), "num_bits 4 is not supported with type 'int'"),
        (compressed("pack-quantized", {**INT4, "group_size": -5}), "group_size -5 must be positive"),
        (compressed("pack-quantized", {**INT4, "strategy": "odd"}), "strategy 'odd'"),
        (compressed("float-quantized", numbers(8, "float", "tensor", symmetric=False)), "symmetric False"),
        (compressed("nvfp4-pack-quantized", numbers(4, "float", "group", group_size=64)), "group_size 64"),
        (compressed("mxfp6-pack-quantized", numbers(6, "float", "group", group_size=32)), "format 'mxfp6-pack-quantized'"),
        ({**compressed("pack-quantized", INT4), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({**compressed("pack-quantized", INT4), "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (compressed("pack-quantized", INT4, numbers(4, "int", "token", dynamic=True)), "num_bits 4 is not supported"),
        ({**compressed("pack-quantized", INT4), "ignore": "re:.*"}, None),
        ({**compressed("pack-quantized", INT4), "ignore": [3]}, "ignore [3] must be a list of strings"),
    ],
)  # fmt: skip
def test_variants_that_are_refused_say_field_and_value(config: dict[str, Any], words: str | None) -> None:
    if words is None:
        assert read(config)(MLP) is None
    else:
        assert words in refused(config)


# --- which linears


def test_compressed_tensors_targets_and_ignores() -> None:
    """A name wins over the class, `re:` matches from the beginning, and what no group names is plain."""
    config = compressed("mixed-precision", INT4)
    config["config_groups"] = {
        "all": {"targets": ["Linear"], "weights": INT4, "format": "pack-quantized"},
        "down": {"targets": ["re:.*down_proj$"], "weights": numbers(8, "int", "channel"), "format": "int-quantized"},
        "one": {"targets": [ATTENTION], "weights": numbers(8, "float", "channel"), "format": "float-quantized"},
        "not": {"targets": ["re:.*gate$"], "weights": None},
    }
    config["ignore"] = ["lm_head", "re:.*layers\\.3\\..*", "model.layers.4.mlp.up_proj", "re:vision"]
    scheme = read(config)
    assert scheme(MLP) == PackedIntScheme(4, 32)
    assert scheme("model.layers.0.mlp.down_proj") == IntScheme("column")
    assert scheme(ATTENTION) == FP8Scheme("column")
    for name in ("lm_head", "model.layers.3.mlp.up_proj", "model.layers.4.mlp.up_proj", "vision.q_proj"):
        assert scheme(name) is None
    assert scheme("model.vision.q_proj") is not None and scheme("model.layers.13.mlp.up_proj") is not None
    only = compressed("pack-quantized", INT4)
    only["config_groups"]["group_0"]["targets"] = ["re:.*mlp.*"]
    assert read(only)(MLP) is not None and read(only)(ATTENTION) is None


def test_gptq_leaves_out() -> None:
    base: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
    inside = read(base | {"modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert inside(ATTENTION) == inside(MLP) == GPTQScheme(4, 32)
    assert inside("model.layers.0.mlp.down_proj") is None and read(base)("lm_head") is None
    assert read(base | {"lm_head": True})("lm_head") == GPTQScheme(4, 32)
    rules = {r"-:.*\.0\.self_attn": {}, r"+:.*up_proj": {"bits": 8, "group_size": 64}, r".*\.5\.": {"bits": 2}}
    dynamic = read(base | {"dynamic": rules, "checkpoint_format": "gptq_v2"})
    assert dynamic(ATTENTION) is None and dynamic(MLP) == GPTQScheme(8, 64, adds_one=False)
    assert dynamic("model.layers.5.mlp.down_proj") == GPTQScheme(2, 32, adds_one=False)
    assert dynamic("model.layers.6.mlp.down_proj") == GPTQScheme(4, 32, adds_one=False)


def test_names_are_matched_by_whole_parts() -> None:
    config = {"quant_method": "fp8", "modules_to_not_convert": ["layers.1", "gate"], "ignored_layers": [ATTENTION]}
    scheme = read(config)
    assert scheme(MLP) is not None and scheme("model.layers.1.mlp.up_proj") is None
    assert scheme(ATTENTION) is None and scheme("model.layers.10.mlp.gate_proj") is not None


def test_modelopt_globs_and_mixed_precision() -> None:
    scheme = read(
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["*.self_attn*", "model.layers.3"]}
    )
    assert scheme(ATTENTION) is None and scheme(MLP) == MODELOPT and scheme("model.layers.3.mlp.up_proj") is None
    layers = {MLP: {"quant_algo": "NVFP4", "group_size": 16}, ATTENTION: {"quant_algo": "FP8"}}
    mixed = read(
        {"quant_method": "modelopt", "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers}}
    )
    assert mixed(MLP) == MODELOPT and isinstance(mixed(ATTENTION), FP8Scheme) and mixed("lm_head") is None


def test_auto_round_layers() -> None:
    base: dict[str, Any] = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
    extra = {ATTENTION: {"bits": 16}, ".*up_proj": {"bits": 8}}
    scheme = read(base | {"packing_format": "auto_round:auto_gptq", "extra_config": extra})
    assert scheme(ATTENTION) is None and scheme(MLP) == GPTQScheme(8, 32, g_idx=False)
    assert read(base | {"packing_format": "auto_round"})(MLP) == GPTQScheme(4, 32, adds_one=False, g_idx=False)
    assert read(base | {"packing_format": "auto_round:auto_awq"})(MLP) == AWQScheme(32)
    assert read(base | {"quant_method": "intel/auto-round", "block_name_to_quantize": "model.layers"})(MLP) is not None
    assert read(base | {"block_name_to_quantize": ["vision.layers"]})(MLP) is None


def test_quark_layers() -> None:
    mx = {"weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}}
    rows = {"weight": {"dtype": "int8", "qscheme": "per_channel"}}
    config = {"quant_method": "quark", "global_quant_config": mx, "layer_quant_config": {"*.self_attn.*": rows}}
    scheme = read(config | {"exclude": ["lm_head", "*gate"]})
    assert scheme(MLP) == QUARK and scheme(ATTENTION) == IntScheme("row") and scheme("model.layers.0.gate") is None


def test_parts_that_are_stored_differently() -> None:
    """q as int4 beside a plain v: each part has a format of its own, and tensors of its own."""
    config = compressed("pack-quantized", INT4)
    config["ignore"] = ["re:.*v_proj"]
    layer = QKVLinear(64, 4, 2, 16)
    layer.path = "model.layers.0.self_attn.qkv_proj"
    layer.bind(placement(quant_for=select(config, torch.float32, placement().kernels)))
    assert isinstance(layer.quant, Mixed)
    assert [type(method).__name__ for method in layer.quant.methods] == ["PackedInt", "PackedInt", "Unquantized"]
    names = {source.name.removeprefix("model.layers.0.self_attn.") for source in layer.sources()}
    quantized = {f"{part}_proj.weight_{name}" for part in "qk" for name in ("packed", "scale", "shape")}
    assert names == quantized | {"v_proj.weight"}
    config["ignore"] = ["re:.*self_attn"]
    layer.bind(placement(quant_for=select(config, torch.float32, placement().kernels)))
    assert isinstance(layer.quant, Unquantized)


def test_what_is_left_plain_may_have_a_format_of_its_own() -> None:
    kernels = placement().kernels
    other = Unquantized(torch.bfloat16, kernels)
    quant_for = select(BY_NAME["mxfp4"].config, torch.float32, kernels, plain=other)
    layer = ColumnLinear(64, {"q_proj": 64, "k_proj": 32})
    layer.path = "model.layers.0.self_attn.qk_proj"
    layer.bind(placement(quant_for=quant_for))
    assert layer.quant is other and quant_for("model.embed_tokens") is other


def test_a_quantized_head() -> None:
    """B155: a head that the checkpoint has quantized is read so; a tied one has no format to ask for."""
    config = compressed("pack-quantized", INT4) | {"ignore": []}
    quant_for = select(config, torch.float32, placement().kernels)
    embedding, head = Embedding(100, 64), LMHead(100, 64)
    embedding.path, head.path = "model.embed_tokens", "lm_head"
    embedding.bind(placement(quant_for=quant_for))
    head.bind(placement(quant_for=quant_for))
    assert isinstance(embedding.quant, Unquantized) and isinstance(head.quant, PackedInt)
    assert {source.name for source in head.sources()} == {
        f"lm_head.weight_{name}" for name in ("packed", "scale", "shape")
    }
    tied = LMHead(100, 64, tied_to=embedding)
    tied.path = "lm_head"
    tied.bind(placement(quant_for=quant_for))
    assert not tied.sources()


@pytest.mark.parametrize(
    ("file", "content", "expected"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}, MODELOPT),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "desc_act": False}, GPTQScheme(4, 128)),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 64, "zero_point": True, "version": "GEMM"}, AWQScheme(64)),
    ],
)
def test_files_beside_config_json(
    file: str, content: dict[str, Any], expected: object, tiny_model: Path, tmp_path: Path
) -> None:
    """Older exports say it in a file of their own; config.json goes before it."""
    for source in tiny_model.iterdir():
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / file).write_text(json.dumps(content))
    stored = describe(tmp_path, ModelConfig()).config["quantization_config"]
    assert read(stored)(MLP) == expected
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "exl2"}}))
    assert describe(tmp_path, ModelConfig()).config["quantization_config"] == {"quant_method": "exl2"}
