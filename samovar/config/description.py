"""ModelDescription: what a checkpoint says about itself, read from headers only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDescription:
    """Facts of one checkpoint; torch-free, no weight byte read.

    `config` has Hugging Face's field names also when the file is a GGUF. `path` is a directory (safetensors) or the
    first .gguf file. `eos_token_ids` joins config, generation_config and tokenizer settings.
    """

    path: Path
    format: Literal["safetensors", "gguf", "dummy"]
    architecture: str
    config: dict[str, Any]
    generation_config: dict[str, Any] = field(default_factory=dict)
    recommended: dict[str, Any] = field(default_factory=dict)
    """The part of `generation_config` that no file says: what is recommended for an alias."""
    eos_token_ids: tuple[int, ...] = ()
    vocab_size: int = 0
    max_position_embeddings: int = 0
    num_parameters: int = 0
    stored_bytes: int = 0
    """Size of all tensors as stored."""
