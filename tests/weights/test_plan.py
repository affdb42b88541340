"""The plan of copies: compared in both directions before a byte is read; loading fills everything or fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samovar.config.checkpoint import describe
from samovar.config.engine import EngineConfig
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError, ConfigError
from samovar.hardware.device import probe
from samovar.kernels.op import Kernels, Target
from samovar.layers import Linear
from samovar.layers.layer import Layer, Placement, Source, bind
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build
from samovar.parallel.mesh import Axis
from samovar.weights.checkpoint import Checkpoint, open_checkpoint
from samovar.weights.load import fill_dummy, load_weights
from samovar.weights.plan import layers_of, plan, weights_of
from samovar.worker.worker import Worker
from tests.weights.gguf_files import tiny_model


def placement(dtype: torch.dtype = torch.float32, tp: Axis | None = None) -> Placement:
    kernels = Kernels(Target("cpu", "", dtype), "cpu")
    return Placement(dtype=dtype, device=torch.device("cpu"), kernels=kernels, tp=tp or Axis())


def checkpoint_folder(folder: Path, name: str = "llama", **changes: torch.Tensor | None) -> Path:
    """A tiny model on disk; `changes` adds, replaces or (None) removes tensors."""
    tiny_model(name).save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors: dict[str, torch.Tensor] = load_file(file)
    for key, value in changes.items():
        if value is None:
            del tensors[key]
        else:
            tensors[key] = value
    save_file(tensors, file)
    return folder


def bound(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> tuple[DecoderLM, Checkpoint]:
    description = describe(folder, ModelConfig(hf_overrides=overrides))
    model = build(description.architecture, description.config)
    bind(model, placement(dtype))
    return model, open_checkpoint(description)


def fail_to_load(folder: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> str:
    model, checkpoint = bound(folder, dtype, **overrides)
    with checkpoint, pytest.raises(CheckpointError) as error:
        load_weights(model, checkpoint)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_both_lists_and_misfits_in_one_error(tmp_path: Path) -> None:
    changes: dict[str, torch.Tensor | None] = {
        "model.layers.1.mlp.up_proj.weight": None,
        "model.layers.2.self_attn.extra.weight": torch.zeros(3),
        "model.layers.0.mlp.down_proj.weight": torch.zeros(64, 64),
        "model.norm.weight": torch.zeros(64, dtype=torch.int32),
    }
    message = fail_to_load(checkpoint_folder(tmp_path, **changes))
    assert "1 tensors are missing from the checkpoint: model.layers.1.mlp.up_proj.weight" in message
    assert "1 checkpoint tensors are read by no layer: model.layers.2.self_attn.extra.weight" in message
    assert "model.layers.0.mlp.down_proj.weight (layer holds (64, 96), checkpoint gives (64, 64))" in message
    assert "model.norm.weight (layer holds float32, checkpoint gives I32)" in message


def test_nothing_is_read_before_the_plan_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint_folder(tmp_path, **{"model.norm.weight": None})
    monkeypatch.setattr(Checkpoint, "_read_bytes", lambda *a: pytest.fail("a byte was read"))
    assert "model.norm.weight" in fail_to_load(folder)


def test_long_lists_are_cut(tmp_path: Path) -> None:
    message = fail_to_load(checkpoint_folder(tmp_path, **{f"junk.{i:03d}": torch.zeros(1) for i in range(100)}))
    assert "100 checkpoint tensors" in message and "junk.011 and 88 more" in message and "junk.012" not in message


@pytest.mark.parametrize("field", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("method", ["exl2", "hqq", "vptq", "fbgemm_fp8"])
def test_formats_nobody_reads_are_refused_by_name(method: str, field: str, tmp_path: Path) -> None:
    """What no file of `samovar.quant` implements is never taken for plain weights."""
    folder = checkpoint_folder(tmp_path)
    config = EngineConfig(model=ModelConfig(dtype="float32", hf_overrides={field: {"quant_method": method}}))
    with pytest.raises(CheckpointError, match=f"quantized as '{method}' .* not supported yet"):
        Worker(config, describe(folder, config.model), probe("cpu"))


def test_float8_without_a_method_does_not_pass_as_plain_weights(tmp_path: Path) -> None:
    changes: dict[str, torch.Tensor | None] = {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}
    assert "checkpoint gives F8_E4M3" in fail_to_load(checkpoint_folder(tmp_path, **changes))


def test_tensors_nobody_needs(tmp_path: Path) -> None:
    changes: dict[str, torch.Tensor | None] = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    model, checkpoint = bound(checkpoint_folder(tmp_path, **changes))
    with checkpoint:
        load_weights(model, checkpoint)


def test_a_second_copy_of_a_tied_weight(tmp_path: Path) -> None:
    """Equal: read once. Different: refused, and the hint works."""
    embedding = load_file(checkpoint_folder(tmp_path / "a", "llama-tied") / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    same = checkpoint_folder(tmp_path / "b", "llama-tied", **{"lm_head.weight": embedding.clone()})
    model, checkpoint = bound(same)
    with checkpoint:
        load_weights(model, checkpoint)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    other = checkpoint_folder(tmp_path / "c", "llama-tied", **{"lm_head.weight": embedding + 1})
    assert "two different tensors" in (message := fail_to_load(other)) and '"tie_word_embeddings": false' in message
    model, checkpoint = bound(other, tie_word_embeddings=False)
    with checkpoint:
        load_weights(model, checkpoint)
    assert torch.equal(model.lm_head.weight, embedding + 1)


def test_values_too_large_for_float16(tmp_path: Path) -> None:
    folder = checkpoint_folder(tmp_path, **{"model.norm.weight": torch.full((64,), 1e6)})
    assert "do not fit float16" in fail_to_load(folder, torch.float16)
    model, checkpoint = bound(folder, torch.bfloat16)
    with checkpoint:
        load_weights(model, checkpoint)


def test_every_element_is_filled_and_progress_ends_at_the_total(tmp_path: Path) -> None:
    """Every weight starts as NaN here; none is left after the load, and every value is the checkpoint's."""
    model, checkpoint = bound(checkpoint_folder(tmp_path))
    for layer in layers_of(model):
        for _, tensor in weights_of(layer):
            tensor.fill_(float("nan"))
    seen: list[tuple[int, int]] = []
    with checkpoint:
        load_weights(model, checkpoint, progress=lambda done, total: seen.append((done, total)))
    assert not any(t.isnan().any() for layer in layers_of(model) for _, t in weights_of(layer))
    assert seen[-1][0] == seen[-1][1] == describe(tmp_path, ModelConfig()).num_parameters
    assert seen == sorted(seen)


def test_loading_into_inference_tensors_with_several_threads(tmp_path: Path) -> None:
    """The worker binds inside inference_mode, which does not reach into other threads by itself."""
    folder = checkpoint_folder(tmp_path)
    plain, checkpoint = bound(folder)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        with torch.inference_mode():
            model, other = bound(folder)
            with other:
                load_weights(model, other)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    with checkpoint:
        load_weights(plain, checkpoint)
    for one, two in zip(layers_of(plain), layers_of(model), strict=True):
        for (_, a), (_, b) in zip(weights_of(one), weights_of(two), strict=True):
            assert torch.equal(a, b)


class Forgetful(Linear):
    """A layer whose sources leave its last row out."""

    def sources(self) -> list[Source]:
        return [Source(s.name, s.target.narrow(0, 0, s.target.shape[0] - 1)) for s in super().sources()]


class Sourceless(Linear):
    """A layer that forgets to say where its weight comes from."""

    def sources(self) -> list[Source]:
        return []


class Twice(Linear):
    """A layer that fills its first half twice and its second half never."""

    def sources(self) -> list[Source]:
        (source,) = super().sources()
        half = source.target.shape[0] // 2
        return [Source(f"{source.name}.{i}", source.target.narrow(0, 0, half)) for i in range(2)]


@pytest.mark.parametrize("kind", [Forgetful, Sourceless, Twice])
def test_a_layer_with_unfilled_memory_is_caught(kind: type[Layer]) -> None:
    model = torch.nn.Module()
    model.layer = kind(8, 6)
    bind(model, placement())
    with pytest.raises(AssertionError, match="layer"):
        fill_dummy(model, 0)


def on_rank(folder: Path, tp: Axis) -> DecoderLM:
    description = describe(folder, ModelConfig())
    model = build(description.architecture, description.config)
    bind(model, placement(tp=tp))
    with open_checkpoint(description) as checkpoint:
        load_weights(model, checkpoint)
    return model


def test_two_ranks_together_hold_what_one_holds(tmp_path: Path) -> None:
    """Each rank's plan passes against the whole checkpoint; the parts join to the whole."""
    tiny_model("llama", vocab_size=1002).save_pretrained(tmp_path)
    whole, *halves = (on_rank(tmp_path, axis) for axis in (Axis(), Axis(0, 2), Axis(1, 2)))

    def joined(path: str, axis: int) -> torch.Tensor:
        return torch.cat([dict(weights_of(half.get_submodule(path)))["weight"] for half in halves], dim=axis)  # type: ignore[arg-type]

    for path, axis in (("model.embed_tokens", 0), ("lm_head", 0), ("model.layers.0.self_attn.o_proj", 1)):
        assert torch.equal(joined(path, axis), dict(weights_of(whole.get_submodule(path)))["weight"])  # type: ignore[arg-type]


def test_a_vocabulary_that_does_not_divide(tmp_path: Path) -> None:
    """B164: any vocabulary loads on one device; on two, an odd one is refused with a remedy before anything is read."""
    tiny_model("llama", vocab_size=1001).save_pretrained(tmp_path)
    assert on_rank(tmp_path, Axis()).lm_head.weight.shape == (1001, 64)
    with pytest.raises(ConfigError, match="1001"):
        on_rank(tmp_path, Axis(0, 2))


@pytest.mark.parametrize("name", ["llama", "gemma3", "phi3", "olmo2"])
def test_dummy_weights(name: str, tmp_path: Path) -> None:
    tiny_model(name).config.save_pretrained(tmp_path)
    description = describe(tmp_path, ModelConfig(load_format="dummy", hf_overrides={"architectures": ["x"]}))
    assert description.format == "dummy"
    architecture = {
        "llama": "LlamaForCausalLM",
        "gemma3": "Gemma3ForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "olmo2": "Olmo2ForCausalLM",
    }
    weights = []
    for seed in (1, 1, 2):
        model = build(architecture[name], description.config)
        bind(model, placement())
        fill_dummy(model, seed)
        weights.append([t.clone() for layer in layers_of(model) for _, t in weights_of(layer)])
    assert all(torch.equal(a, b) for a, b in zip(weights[0], weights[1]))
    assert not all(torch.equal(a, b) for a, b in zip(weights[0], weights[2]))
    for tensor in weights[0]:
        assert tensor.isfinite().all()
        if tensor.dim() == 2:
            assert 0.5 < tensor.std() * tensor.shape[1] ** 0.5 < 2


def test_dummy_weights_larger_than_the_pattern() -> None:
    model = torch.nn.Module()
    model.wide = Linear(1_200_000, 2)
    model.tall = Linear(64, 40_000)
    bind(model, placement(torch.bfloat16))
    fill_dummy(model, 0)
    for layer in (model.wide, model.tall):
        weight = layer.weights["weight"].float()
        assert weight.isfinite().all() and abs(weight.std().item() * weight.shape[1] ** 0.5 - 1) < 0.1


def test_the_plan_reads_headers_only(tmp_path: Path) -> None:
    model, checkpoint = bound(checkpoint_folder(tmp_path))
    assert {source.name for source in plan(model, checkpoint.tensors)} == set(checkpoint.tensors)
