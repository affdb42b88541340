"""describe(): what a checkpoint on disk says about itself, without the network and without reading weights."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.errors import CheckpointError, ConfigError
from samovar.hub.locate import locate
from tests.weights.gguf_files import tiny_model, write_gguf

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 100, "hidden_size": 8,
    "max_position_embeddings": 64, "eos_token_id": 2,
}  # fmt: skip


def folder_with(path: Path, config: dict[str, Any] | str = CONFIG, **files: Any) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    save_file({"w": torch.zeros(4, 3), "v": torch.zeros(5, dtype=torch.bfloat16)}, path / "model.safetensors")
    return path


def test_folder(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path,
        generation_config={"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 7, 500]},
        tokenizer_config={
            "eos_token": {"content": "<end>"},
            "added_tokens_decoder": {"9": {"content": "<end>"}, "x": 1},
        },
    )
    for path in (folder, folder / "model.safetensors", folder / "config.json"):
        description = describe(path, ModelConfig())
        assert (description.path, description.format) == (folder, "safetensors")
        assert description.architecture == "LlamaForCausalLM" and description.config == CONFIG
        assert description.eos_token_ids == (2, 7, 9)  # 500 is outside the vocabulary
        assert description.generation_config["temperature"] == 0.6
        assert (description.vocab_size, description.max_position_embeddings) == (100, 64)
        assert (description.num_parameters, description.stored_bytes) == (17, 58)


@pytest.mark.parametrize("ends", ["x", [2, "x"], [True], 2.0, {"a": 1}])
def test_end_ids_that_are_none(tmp_path: Path, ends: Any) -> None:
    """An end id of another kind is refused, not left out: the model would not stop there."""
    for files in ({"generation_config": {"eos_token_id": ends}}, {"config": {**CONFIG, "eos_token_id": ends}}):
        folder = folder_with(tmp_path, files.pop("config", CONFIG), **files)
        with pytest.raises(CheckpointError, match="eos_token_id must be"):
            describe(folder, ModelConfig())


def test_overrides(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {**CONFIG, "rope_scaling": {"rope_type": "linear", "factor": 2.0}})
    model_config = ModelConfig(hf_overrides={"rope_scaling": {"factor": 4.0}, "vocab_size": 50, "architectures": ["X"]})
    description = describe(folder, model_config)
    assert description.config["rope_scaling"] == {"rope_type": "linear", "factor": 4.0}
    assert (description.vocab_size, description.architecture) == (50, "X")


def test_generation_config_sources(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "m", generation_config={"top_k": 20, "eos_token_id": 7})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "generation_config.json").write_text('{"top_k": 3}')
    settings = {"auto": 20, "vllm": None, str(tmp_path / "other"): 3}
    for where, top_k in settings.items():
        description = describe(folder, ModelConfig(generation_config=where, override_generation_config={"min_p": 0.1}))
        assert description.generation_config.get("top_k") == top_k
        assert description.generation_config["min_p"] == 0.1
        assert description.eos_token_ids == (2, 7)  # where an answer ends is no sampling default
    with pytest.raises(ConfigError, match="nowhere"):
        describe(folder, ModelConfig(generation_config="nowhere"))


def test_nested_text_config(tmp_path: Path) -> None:
    inner = {k: v for k, v in CONFIG.items() if k != "architectures"} | {"model_type": "inner"}
    outer = {"architectures": ["SomethingForConditionalGeneration"], "model_type": "outer", "text_config": inner}
    description = describe(folder_with(tmp_path, outer), ModelConfig())
    assert description.vocab_size == 100 and description.architecture == "SomethingForConditionalGeneration"
    assert description.config["hidden_size"] == 8 and description.config["model_type"] == "outer"


def test_yarn_stretches_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert (
        describe(folder_with(tmp_path, {**CONFIG, "rope_scaling": rope}), ModelConfig()).max_position_embeddings == 256
    )


def test_dummy_needs_only_a_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    description = describe(tmp_path, ModelConfig(load_format="dummy"))
    assert (description.format, description.num_parameters) == ("dummy", 0)
    with pytest.raises(CheckpointError, match="no weights"):
        describe(tmp_path, ModelConfig())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("[" * 100_000, "not valid JSON"),
        ({**CONFIG, "architectures": None}, "names no architecture"),
        ({**CONFIG, "vocab_size": "many"}, "vocab_size"),
        ({**CONFIG, "vocab_size": 0}, "vocab_size"),
        ({**CONFIG, "max_position_embeddings": -1}, "max_position_embeddings"),
    ],
)
def test_bad_configs(config: dict[str, Any] | str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as error:
        describe(folder_with(tmp_path, config), ModelConfig())
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value)


def test_pickles_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    pickle = tmp_path / "pytorch_model.bin"
    pickle.write_bytes(b"\x80\x04.")
    for path in (tmp_path, pickle):
        with pytest.raises(CheckpointError, match=r"pickle.*pytorch_model.bin|pytorch_model.bin.*pickle"):
            describe(path, ModelConfig())


def test_what_is_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path / "none.gguf", tmp_path):
        with pytest.raises(CheckpointError, match=str(path)):
            describe(path, ModelConfig())
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="neither"):
        describe(tmp_path / "notes.txt", ModelConfig())


def test_a_shard_is_not_a_model(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    save_file({"x": torch.zeros(1)}, folder / "extra.safetensors")
    with pytest.raises(CheckpointError, match="name the folder"):
        describe(folder / "extra.safetensors", ModelConfig())


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("the network was touched")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    monkeypatch.setattr(subprocess, "run", refuse)


@pytest.mark.usefixtures("no_network")
def test_local_gguf_paths_never_touch_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B158: relative, absolute, symlinked, with spaces, two levels deep, in a folder, without the suffix."""
    folder = tmp_path / "org" / "my models"
    folder.mkdir(parents=True)
    write_gguf(folder / "m.Q4_K_M.gguf", tiny_model("llama"))
    (tmp_path / "link.gguf").symlink_to(folder / "m.Q4_K_M.gguf")
    (tmp_path / "bare").write_bytes((folder / "m.Q4_K_M.gguf").read_bytes())
    monkeypatch.chdir(tmp_path)
    spellings = [
        "org/my models/m.Q4_K_M.gguf", "./org/my models/m.Q4_K_M.gguf", str(folder / "m.Q4_K_M.gguf"), "link.gguf",
        "org/my models", "bare", "org/../org/my models",
    ]  # fmt: skip
    for spelling in spellings:
        path = locate(ModelConfig(model=spelling))
        description = describe(path, ModelConfig(model=spelling))
        assert description.format == "gguf" and description.num_parameters > 0, spelling
    monkeypatch.chdir(folder)
    assert describe(locate(ModelConfig(model="m.Q4_K_M.gguf")), ModelConfig()).format == "gguf"


@pytest.mark.usefixtures("no_network")
def test_local_folders_never_touch_the_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B158 for safetensors: owner/name looks like a hub id, but it is a folder here."""
    folder_with(tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    assert describe(locate(ModelConfig(model="owner/name")), ModelConfig()).format == "safetensors"


@pytest.mark.usefixtures("no_network")
@pytest.mark.parametrize(
    "spelling", ["./m.gguf", "m.gguf", "/no/such/folder", "~/no-such-model", "dir/m.gguf", "m.safetensors"]
)
def test_a_missing_local_path_is_not_taken_for_a_hub_id(
    spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B158: a typing error in a path gives an answer at once, not a hub error after retries."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="no such file or folder"):
        locate(ModelConfig(model=spelling))


def test_a_folder_with_two_gguf_models(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / name, tiny_model("llama"))
    with pytest.raises(CheckpointError, match=r"several GGUF models.*a.gguf, b.gguf"):
        describe(tmp_path, ModelConfig())


def test_describing_imports_neither_torch_nor_numpy(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", tiny_model("llama"))
    folder_with(tmp_path / "f")
    program = (
        "import sys; from samovar.hub.locate import locate; from samovar.config.checkpoint import describe;"
        "from samovar.config.groups import ModelConfig;"
        f"[describe(locate(ModelConfig(model=p)), ModelConfig()) for p in {[str(tmp_path / 'm.gguf'), str(tmp_path / 'f')]}];"
        "heavy = {'torch', 'numpy', 'transformers', 'huggingface_hub', 'gguf'} & sys.modules.keys(); sys.exit(str(heavy) if heavy else 0)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
