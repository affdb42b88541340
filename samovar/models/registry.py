"""Architecture name, as in config.json -> the class that implements it. To add a family is to add a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from samovar.errors import CheckpointError
from samovar.models.decoder import DecoderLM

ARCHITECTURES: dict[str, str] = {
    "Gemma2ForCausalLM": "gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "gemma3:Gemma3ForCausalLM",
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "MistralForCausalLM": "llama:MistralForCausalLM",
    "Olmo2ForCausalLM": "olmo2:Olmo2ForCausalLM",
    "Phi3ForCausalLM": "phi3:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
    "SmolLM3ForCausalLM": "smollm3:SmolLM3ForCausalLM",
}
"""architecture -> "file:Class" in this folder."""


def resolve(architecture: str) -> type[DecoderLM]:
    """The class of `architecture`; raises `CheckpointError` naming it, with what there is, if unsupported."""
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"the architecture {architecture!r} is not supported; there are {', '.join(sorted(ARCHITECTURES))}"
        )
    file, _, name = ARCHITECTURES[architecture].partition(":")
    found: type[DecoderLM] = getattr(importlib.import_module(f"samovar.models.{file}"), name)
    return found


def build(architecture: str, raw: Mapping[str, Any]) -> DecoderLM:
    """Declare the model of a config.json: no tensor exists until `layers.bind`."""
    family = resolve(architecture)
    return family(family.read_config(raw))
