"""Describes a checkpoint on disk: config, sampling defaults, end ids, sizes. Reads headers only, never the network."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from samovar.config.description import ModelDescription
from samovar.config.gguf import GGUFHeader, is_gguf, read_gguf_header, split_files
from samovar.config.gguf_config import end_ids, hf_config, hf_generation_config
from samovar.config.groups import ModelConfig
from samovar.config.safetensors_header import read_safetensors_folder, safetensors_files
from samovar.config.text_defaults import text_defaults
from samovar.errors import CheckpointError, ConfigError

QUANTIZATION_FILES = {
    "hf_quant_config.json": "modelopt",
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
}
"""Where some tools say how weights are quantized, if not in config.json; and which tools they are."""
MAX_JSON_BYTES = 64 * 1024 * 1024
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def describe(
    path: str | Path, model_config: ModelConfig, *, recommended: Mapping[str, Any] | None = None
) -> ModelDescription:
    """What the checkpoint at `path` says about itself.

    `path` is a Hugging Face folder, a config.json or a .safetensors file in one, a .gguf file (any part of a split
    one), or a folder with one GGUF model. `hf_overrides` are laid over the config, `override_generation_config` over
    the sampling defaults. `recommended` are sampling defaults under those of the checkpoint's own files; they count
    while `generation_config` is "auto". Raises `CheckpointError` naming the file, `ConfigError` for a setting that does not fit it.
    """
    description = _describe(Path(path), model_config)
    if not recommended or model_config.generation_config != "auto":
        return description
    added = {name: value for name, value in recommended.items() if name not in description.generation_config}
    return replace(description, generation_config=description.generation_config | added, recommended=added)


def _describe(path: Path, model_config: ModelConfig) -> ModelDescription:
    gguf = _gguf_of(path, model_config.load_format)
    if gguf is not None:
        return _describe_gguf(gguf, model_config)
    if not path.exists():
        raise CheckpointError(f"{path}: does not exist")
    if path.suffix in PICKLE_SUFFIXES:
        raise CheckpointError(
            f"{path}: pickle checkpoints can run code when opened and are refused; use safetensors or GGUF"
        )
    if path.is_file() and path.name != "config.json" and path.suffix != ".safetensors":
        raise CheckpointError(f"{path}: is neither a GGUF file, a .safetensors file nor a config.json")
    folder = path if path.is_dir() else path.parent
    if path.suffix == ".safetensors" and safetensors_files(folder) != [path]:
        raise CheckpointError(f"{path}: is not the whole checkpoint in {folder}; name the folder instead")
    return _describe_folder(folder, model_config)


def _gguf_of(path: Path, load_format: str) -> Path | None:
    """The GGUF file meant by `path` (the first part of a split one), or None if it means another format."""
    if load_format == "safetensors":
        return None
    found: Path | None = None
    if path.is_file() and (path.suffix == ".gguf" or is_gguf(path)):
        found = split_files(path)[0]
    elif path.is_dir() and (
        load_format == "gguf" or not (path / "config.json").exists() or not any(path.glob("*.safetensors"))
    ):
        models = sorted({split_files(p)[0] for p in path.glob("*.gguf") if not p.name.startswith("mmproj")})
        if len(models) > 1:
            raise CheckpointError(
                f"{path}: holds several GGUF models, name one: {', '.join(p.name for p in models[:8])}"
            )
        found = models[0] if models else None
    if found is None and load_format == "gguf":
        raise CheckpointError(f"{path}: load_format is gguf, but there is no GGUF file here")
    return found


def _describe_gguf(path: Path, model_config: ModelConfig) -> ModelDescription:
    header = read_gguf_header(path)
    config = _overlay(hf_config(header), model_config.hf_overrides)
    defaults = _generation_config(model_config, hf_generation_config(header))
    return _description(
        path,
        "dummy" if model_config.load_format == "dummy" else "gguf",
        (config, defaults),
        end_ids(header),
        *_gguf_sizes(header),
    )


def _gguf_sizes(header: GGUFHeader) -> tuple[int, int]:
    return sum(prod(t.shape) for t in header.tensors.values()), sum(t.nbytes for t in header.tensors.values())


def _describe_folder(folder: Path, model_config: ModelConfig) -> ModelDescription:
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder}: has no config.json and no .gguf file")
    config = _overlay(_quantized(folder, _flat(read_json(folder / "config.json"))), model_config.hf_overrides)
    own = read_json(folder / "generation_config.json") if (folder / "generation_config.json").is_file() else {}
    ends = _ids(own.get("eos_token_id")) + _tokenizer_ends(folder)
    defaults = _generation_config(model_config, own)
    if model_config.load_format == "dummy":
        return _description(folder, "dummy", (config, defaults), ends, 0, 0)
    if not safetensors_files(folder):
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLE_SUFFIXES)
        if pickles:
            raise CheckpointError(
                f"{folder}: holds pickle weights only ({pickles[0]}), which are refused; convert to safetensors"
            )
        raise CheckpointError(f"{folder}: holds no weights (.safetensors or .gguf)")
    tensors = read_safetensors_folder(folder).values()
    sizes = sum(prod(t.shape) for t in tensors), sum(t.nbytes for t in tensors)
    return _description(folder, "safetensors", (config, defaults), ends, *sizes)


def _description(
    path: Path,
    kind: Any,
    configs: tuple[dict[str, Any], dict[str, Any]],
    ends: list[int],
    num_parameters: int,
    stored_bytes: int,
) -> ModelDescription:
    config, generation_config = configs
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or not architectures or not isinstance(architectures[0], str):
        raise CheckpointError(f"{path}: its config names no architecture; set it with --hf-overrides")
    vocab_size = config.get("vocab_size")
    if isinstance(vocab_size, bool) or not isinstance(vocab_size, int) or vocab_size < 1:
        raise CheckpointError(f"{path}: vocab_size must be a positive integer, its config says {vocab_size!r}")
    every_end = dict.fromkeys(_ids(config.get("eos_token_id")) + ends)
    return ModelDescription(
        path=path,
        format=kind,
        architecture=architectures[0],
        config=config,
        generation_config=generation_config,
        eos_token_ids=tuple(i for i in every_end if 0 <= i < vocab_size),
        vocab_size=vocab_size,
        max_position_embeddings=_context_length(path, config),
        num_parameters=num_parameters,
        stored_bytes=stored_bytes,
    )


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object from a file of bounded size; `CheckpointError` naming the file if it is anything else."""
    try:
        if (size := path.stat().st_size) > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: is {size} bytes long, the limit is {MAX_JSON_BYTES}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """A config whose text model is nested under text_config (or llm_config), with those fields at the top."""
    for key in ("text_config", "llm_config"):
        inner = config.get(key)
        if isinstance(inner, dict):
            outer = text_defaults(config) | {k: v for k, v in config.items() if k != key}
            return outer | {
                k: v for k, v in inner.items() if k not in ("architectures", "model_type") or k not in outer
            }
    return config


def _quantized(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config with a quantization_config, if a file of its own holds that."""
    if config.get("quantization_config") or config.get("compression_config"):
        return config
    for name, method in QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            return {**config, "quantization_config": {"quant_method": method, **read_json(folder / name)}}
    return config


def _overlay(config: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`changes` laid over `config`; objects are merged, everything else is replaced."""
    result = dict(config)
    for key, value in changes.items():
        old = result.get(key)
        result[key] = _overlay(old, value) if isinstance(old, dict) and isinstance(value, Mapping) else value
    return result


def _generation_config(model_config: ModelConfig, own: dict[str, Any]) -> dict[str, Any]:
    """Sampling defaults from where `generation_config` says, with the overrides on top."""
    where = model_config.generation_config
    if where == "vllm":
        own = {}
    elif where != "auto":
        file = Path(where) if where.endswith(".json") else Path(where) / "generation_config.json"
        if not file.is_file():
            raise ConfigError(
                f"--generation-config must be auto, vllm or a folder with generation_config.json, got {where!r}"
            )
        own = read_json(file)
    return _overlay(own, model_config.override_generation_config)


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise CheckpointError(f"eos_token_id must be a token id or a list of ids, the model's files say {value!r}")
    return values


def _tokenizer_ends(folder: Path) -> list[int]:
    """The id of the eos token that tokenizer_config.json names, if that file also says its id."""
    if not (folder / "tokenizer_config.json").is_file():
        return []
    settings = read_json(folder / "tokenizer_config.json")
    eos, added = settings.get("eos_token"), settings.get("added_tokens_decoder")
    text = eos.get("content") if isinstance(eos, dict) else eos
    if not isinstance(text, str) or not isinstance(added, dict):
        return []
    return [
        int(i)
        for i, token in added.items()
        if i.isdecimal() and isinstance(token, dict) and token.get("content") == text
    ]


def _context_length(path: Path, config: dict[str, Any]) -> int:
    """Positions the model was made for; YaRN stretches the original length by its factor."""
    length = config.get("max_position_embeddings", 0)
    if isinstance(length, bool) or not isinstance(length, int) or length < 0:
        raise CheckpointError(f"{path}: max_position_embeddings must be a positive integer, its config says {length!r}")
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "yarn":
        original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
        if isinstance(original, int) and isinstance(factor, (int, float)):
            length = max(length, int(original * factor))
    return length
