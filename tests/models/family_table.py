"""Tiny random configs of every family and variant. To add a family is to add a row here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

SMALL: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
}
"""Fields of every row unless it says otherwise."""


@dataclass(frozen=True)
class Family:
    """One row: architecture, and fields of config.json that differ from `SMALL`.

    `max_len` is the longest sequence served (length-dependent rope scalings look at it). `reference` is the module that
    holds the class named like the architecture to compare with.
    """

    name: str
    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)
    max_len: int | None = None
    reference: str = "transformers"

    @property
    def raw(self) -> dict[str, Any]:
        return {**SMALL, **self.fields}

    @property
    def unlowered(self) -> str:
        """A word of why a step of this family cannot be one call of the CPU library; empty if it can."""
        if "residual_multiplier" in self.fields:
            return "mul"
        return r"\((Router|Experts|RMSNorm)\)" if "num_experts_per_tok" in self.fields else ""


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


_LONG = {"short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7], "long_factor": [2.0, 2.5, 3, 4, 5, 6, 7, 8]}
_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7}

_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
_GPT_OSS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24, "sliding_window": 7}
_DEEPSEEK = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}

FAMILIES: list[Family] = [
    Family("llama", "LlamaForCausalLM"),
    Family("llama-tied", "LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    Family("llama-bias", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    Family("llama-head-dim", "LlamaForCausalLM", {"head_dim": 24, "num_key_value_heads": 4}),
    Family("llama-gelu", "LlamaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    Family("llama-linear", "LlamaForCausalLM", _rope("linear", factor=3.0)),
    Family("llama-dynamic", "LlamaForCausalLM", _rope("dynamic", factor=2.0)),
    Family(
        "llama-dynamic-long", "LlamaForCausalLM", {**_rope("dynamic", factor=2.0), "max_position_embeddings": 24}, 41
    ),
    Family(
        "llama-llama3",
        "LlamaForCausalLM",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    Family("llama-yarn", "LlamaForCausalLM", _rope("yarn", factor=4.0, original_max_position_embeddings=24)),
    Family(
        "llama-yarn-exact",
        "LlamaForCausalLM",
        _rope("yarn", factor=4.0, original_max_position_embeddings=24, truncate=False, beta_fast=16, beta_slow=2),
    ),
    Family(
        "llama-yarn-mscale",
        "LlamaForCausalLM",
        _rope("yarn", factor=4.0, original_max_position_embeddings=24, mscale=1.0, mscale_all_dim=0.7),
    ),
    Family(
        "llama-yarn-factor",
        "LlamaForCausalLM",
        _rope("yarn", factor=4.0, original_max_position_embeddings=24, attention_factor=1.3),
    ),
    Family(
        "llama-longrope",
        "LlamaForCausalLM",
        _rope("longrope", original_max_position_embeddings=24, factor=4.0, **_LONG),
        41,
    ),
    Family("mistral", "MistralForCausalLM", {"sliding_window": None}),
    Family("mistral-window", "MistralForCausalLM", {"sliding_window": 6}),
    Family("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    Family(
        "qwen2-window", "Qwen2ForCausalLM", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    ),
    Family("qwen3", "Qwen3ForCausalLM", {"head_dim": 24}),
    Family("qwen3-bias", "Qwen3ForCausalLM", {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True}),
    Family("gemma2", "Gemma2ForCausalLM", {**_GEMMA, "tie_word_embeddings": True}),
    Family(
        "gemma2-caps", "Gemma2ForCausalLM", {**_GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    ),
    Family("gemma3", "Gemma3ForCausalLM", {**_GEMMA, "num_hidden_layers": 7, "tie_word_embeddings": True}),
    Family(
        "gemma3-scaled",
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
    ),
    Family("phi3", "Phi3ForCausalLM", {"pad_token_id": 0}),
    Family("phi3-window", "Phi3ForCausalLM", {"pad_token_id": 0, "sliding_window": 9}),
    Family(
        "phi3-short",
        "Phi3ForCausalLM",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 48,
            **_rope("longrope", partial_rotary_factor=1.0, original_max_position_embeddings=48, **_LONG),
        },
        48,
    ),
    Family(
        "phi3-long-partial",
        "Phi3ForCausalLM",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 24,
            **_rope(
                "longrope",
                partial_rotary_factor=0.5,
                original_max_position_embeddings=24,
                short_factor=_LONG["short_factor"][:4],
                long_factor=_LONG["long_factor"][:4],
            ),
        },
        41,
    ),
    Family("smollm3", "SmolLM3ForCausalLM", {"pad_token_id": 0, "num_hidden_layers": 5, "tie_word_embeddings": True}),
    Family(
        "smollm3-window",
        "SmolLM3ForCausalLM",
        {"pad_token_id": 0, "no_rope_layers": [1, 0, 1], "use_sliding_window": True, "sliding_window": 6},
    ),
    Family("olmo2", "Olmo2ForCausalLM", {"pad_token_id": 0}),
    Family("olmo2-mha", "Olmo2ForCausalLM", {"pad_token_id": 0, "num_key_value_heads": 4, "attention_bias": True}),
    Family("qwen3-moe", "Qwen3MoeForCausalLM", {**_MOE, "head_dim": 24, "norm_topk_prob": True}),
    Family("qwen3-moe-mixed", "Qwen3MoeForCausalLM", {**_MOE, "mlp_only_layers": [1], "tie_word_embeddings": True}),
    Family(
        "qwen2-moe", "Qwen2MoeForCausalLM", {**_MOE, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}
    ),
    Family("mixtral", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24}),
    Family(
        "mixtral-window", "MixtralForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 6}
    ),
    Family("olmoe", "OlmoeForCausalLM", {"pad_token_id": 0, "num_experts": 4, "num_experts_per_tok": 2}),
    Family("flexolmo", "FlexOlmoForCausalLM", {"pad_token_id": 0, "num_experts": 4, "num_experts_per_tok": 2}),
    Family("granite", "GraniteForCausalLM", _GRANITE),
    Family("granitemoe", "GraniteMoeForCausalLM", {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Family(
        "gpt-oss",
        "GptOssForCausalLM",
        {**_GPT_OSS, **_rope("yarn", factor=4.0, original_max_position_embeddings=24, truncate=False)},
    ),
    Family(
        "glm4-moe",
        "Glm4MoeForCausalLM",
        {**_DEEPSEEK, "attention_bias": True, "use_qk_norm": True, "n_group": 3, "topk_group": 2},
    ),
    Family("glm4-moe-air", "Glm4MoeForCausalLM", {**_DEEPSEEK, "head_dim": 24, "routed_scaling_factor": 1.0}),
    Family(
        "dots1", "Dots1ForCausalLM", {**_DEEPSEEK, "norm_topk_prob": True, "sliding_window": 6, "max_window_layers": 2}
    ),
    Family("solar-open", "SolarOpenForCausalLM", {**_DEEPSEEK, "head_dim": 16}),
    Family(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24, "rotary_dim": 12},
    ),
]
