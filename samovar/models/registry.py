"""Architecture name, as in config.json -> the class that implements it. To add a family is to add a line here."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from samovar.errors import CheckpointError
from samovar.models.decoder import DecoderLM

ARCHITECTURES: dict[str, str] = {
    "Dots1ForCausalLM": "glm4_moe:Dots1ForCausalLM",
    "FlexOlmoForCausalLM": "olmoe:FlexOlmoForCausalLM",
    "Gemma2ForCausalLM": "gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "gemma3:Gemma3ForCausalLM",
    "Glm4MoeForCausalLM": "glm4_moe:Glm4MoeForCausalLM",
    "GptOssForCausalLM": "gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "granite:GraniteForCausalLM",
    "GraniteMoeForCausalLM": "granite:GraniteMoeForCausalLM",
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "MiniMaxM2ForCausalLM": "minimax_m2:MiniMaxM2ForCausalLM",
    "MistralForCausalLM": "llama:MistralForCausalLM",
    "MixtralForCausalLM": "mixtral:MixtralForCausalLM",
    "Olmo2ForCausalLM": "olmo2:Olmo2ForCausalLM",
    "OlmoeForCausalLM": "olmoe:OlmoeForCausalLM",
    "Phi3ForCausalLM": "phi3:Phi3ForCausalLM",
    "Qwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "qwen3_moe:Qwen3MoeForCausalLM",
    "SmolLM3ForCausalLM": "smollm3:SmolLM3ForCausalLM",
    "SolarOpenForCausalLM": "glm4_moe:SolarOpenForCausalLM",
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
