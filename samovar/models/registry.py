"""Architecture name, as in config.json -> the class that implements it. To add a family is to add a line here.

What has no line runs through Transformers, if it is among what passed the test of that path (`models.generic`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from samovar.errors import CheckpointError
from samovar.models.generic.verdicts import refusal

if TYPE_CHECKING:  # families bring torch, which those who only want the list do not need
    from samovar.models.decoder import DecoderLM

ARCHITECTURES: dict[str, str] = {
    "AfmoeForCausalLM": "afmoe:AfmoeForCausalLM",
    "ApertusForCausalLM": "arcee:ApertusForCausalLM",
    "ArceeForCausalLM": "arcee:ArceeForCausalLM",
    "BambaForCausalLM": "bamba:BambaForCausalLM",
    "Cohere2ForCausalLM": "cohere:Cohere2ForCausalLM",
    "CohereForCausalLM": "cohere:CohereForCausalLM",
    "DeepseekV2ForCausalLM": "deepseek_v2:DeepseekV2ForCausalLM",
    "DeepseekV32ForCausalLM": "deepseek_v32:DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM": "deepseek_v3:DeepseekV3ForCausalLM",
    "Dots1ForCausalLM": "glm4_moe:Dots1ForCausalLM",
    "Ernie4_5ForCausalLM": "ernie4_5:ErnieForCausalLM",
    "Ernie4_5_MoeForCausalLM": "ernie4_5:ErnieMoeForCausalLM",
    "Exaone4ForCausalLM": "exaone4:Exaone4ForCausalLM",
    "FalconH1ForCausalLM": "falcon_h1:FalconH1ForCausalLM",
    "FalconMambaForCausalLM": "mamba:FalconMambaForCausalLM",
    "FlexOlmoForCausalLM": "olmoe:FlexOlmoForCausalLM",
    "Gemma2ForCausalLM": "gemma2:Gemma2ForCausalLM",
    "Gemma3ForCausalLM": "gemma3:Gemma3ForCausalLM",
    "Gemma3ForConditionalGeneration": "gemma3:Gemma3ForConditionalGeneration",
    "Gemma3nForCausalLM": "gemma3n:Gemma3nForCausalLM",
    "Gemma3nForConditionalGeneration": "gemma3n:Gemma3nForConditionalGeneration",
    "Gemma4ForCausalLM": "gemma4:Gemma4ForCausalLM",
    "Gemma4ForConditionalGeneration": "gemma4:Gemma4ForConditionalGeneration",
    "GemmaForCausalLM": "gemma2:GemmaForCausalLM",
    "Glm4ForCausalLM": "glm:Glm4ForCausalLM",
    "Glm4MoeForCausalLM": "glm4_moe:Glm4MoeForCausalLM",
    "Glm4MoeLiteForCausalLM": "deepseek_v3:Glm4MoeLiteForCausalLM",
    "GlmMoeDsaForCausalLM": "deepseek_v32:GlmMoeDsaForCausalLM",
    "GlmForCausalLM": "glm:GlmForCausalLM",
    "GptOssForCausalLM": "gpt_oss:GptOssForCausalLM",
    "GraniteForCausalLM": "granite:GraniteForCausalLM",
    "GraniteMoeForCausalLM": "granite:GraniteMoeForCausalLM",
    "GraniteMoeHybridForCausalLM": "granite_hybrid:GraniteMoeHybridForCausalLM",
    "GraniteMoeSharedForCausalLM": "granite:GraniteMoeSharedForCausalLM",
    "HunYuanDenseV1ForCausalLM": "hunyuan:HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM": "hunyuan:HunYuanMoEV1ForCausalLM",
    "InternLM3ForCausalLM": "llama:InternLM3ForCausalLM",
    "JambaForCausalLM": "jamba:JambaForCausalLM",
    "Lfm2ForCausalLM": "lfm2:Lfm2ForCausalLM",
    "Lfm2MoeForCausalLM": "lfm2_moe:Lfm2MoeForCausalLM",
    "Llama4ForCausalLM": "llama4:Llama4ForCausalLM",
    "Llama4ForConditionalGeneration": "llama4:Llama4ForConditionalGeneration",
    "LlamaForCausalLM": "llama:LlamaForCausalLM",
    "Mamba2ForCausalLM": "mamba2:Mamba2ForCausalLM",
    "MambaForCausalLM": "mamba:MambaForCausalLM",
    "MiniCPM3ForCausalLM": "minicpm3:MiniCPM3ForCausalLM",
    "MiniMaxM2ForCausalLM": "minimax_m2:MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM": "ministral:Ministral3ForCausalLM",
    "MinistralForCausalLM": "ministral:MinistralForCausalLM",
    "Mistral3ForConditionalGeneration": "ministral:Mistral3ForConditionalGeneration",
    "Mistral4ForCausalLM": "mistral4:Mistral4ForCausalLM",
    "MistralForCausalLM": "llama:MistralForCausalLM",
    "MixtralForCausalLM": "mixtral:MixtralForCausalLM",
    "NemotronForCausalLM": "starcoder2:NemotronForCausalLM",
    "NemotronHForCausalLM": "nemotron_h:NemotronHForCausalLM",
    "Olmo2ForCausalLM": "olmo2:Olmo2ForCausalLM",
    "Olmo3ForCausalLM": "olmo2:Olmo3ForCausalLM",
    "OlmoForCausalLM": "olmo:OlmoForCausalLM",
    "OlmoeForCausalLM": "olmoe:OlmoeForCausalLM",
    "Phi3ForCausalLM": "phi3:Phi3ForCausalLM",
    "PhiForCausalLM": "phi:PhiForCausalLM",
    "PhimoeForCausalLM": "phimoe:PhimoeForCausalLM",
    "Qwen2ForCausalLM": "qwen2:Qwen2ForCausalLM",
    "Qwen2MoeForCausalLM": "qwen2_moe:Qwen2MoeForCausalLM",
    "Qwen3ForCausalLM": "qwen3:Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM": "qwen3_moe:Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM": "qwen3_next:Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM": "qwen3_5:Qwen35ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "qwen3_5:Qwen35ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM": "qwen3_5:Qwen35MoeForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "qwen3_5:Qwen35MoeForConditionalGeneration",
    "SeedOssForCausalLM": "seed_oss:SeedOssForCausalLM",
    "SmolLM3ForCausalLM": "smollm3:SmolLM3ForCausalLM",
    "SolarOpenForCausalLM": "glm4_moe:SolarOpenForCausalLM",
    "StableLmForCausalLM": "starcoder2:StableLmForCausalLM",
    "Starcoder2ForCausalLM": "starcoder2:Starcoder2ForCausalLM",
    "YoutuForCausalLM": "deepseek_v3:YoutuForCausalLM",
}
"""architecture -> "file:Class" in this folder."""


def resolve(architecture: str) -> type[DecoderLM]:
    """The native class of `architecture`; raises `CheckpointError` naming it, with what there is, if there is none."""
    if architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"the architecture {architecture!r} is not supported; there are {', '.join(sorted(ARCHITECTURES))}"
        )
    file, _, name = ARCHITECTURES[architecture].partition(":")
    found: type[DecoderLM] = getattr(importlib.import_module(f"samovar.models.{file}"), name)
    return found


def build(architecture: str, raw: Mapping[str, Any], implementation: str = "auto") -> DecoderLM:
    """Declare the model of a config.json: no tensor exists until `layers.bind`. `implementation` is `--model-impl`."""
    is_native = architecture in ARCHITECTURES and implementation in ("auto", "native")
    if is_native or implementation == "native":
        family = resolve(architecture)
        return family(family.read_config(raw))
    reason = refusal(architecture)
    if reason is not None and implementation != "any":
        raise CheckpointError(
            f"the architecture {architecture!r} is not supported: Samovar has no family of that name, and it does not run "
            f"through Transformers: {reason}. `samovar models` lists what there is; --model-impl any tries it nevertheless"
        )
    # Transformers takes seconds to import and need not be installed.
    from samovar.models.generic.model import GenericLM

    return GenericLM(architecture, raw)
