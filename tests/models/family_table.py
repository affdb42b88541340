"""Tiny random configs of every family and variant. To add a family is to add a row here."""

from __future__ import annotations

from typing import Any

from tests.models.family import Family, rope
from tests.models.family_rows import ROWS

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

_LATENT = {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
    "num_key_value_heads": 4,
}
_INDEXER = {"index_topk": 96, "index_head_dim": 16, "index_n_heads": 2}
_LATENT_YARN = rope("yarn", factor=4.0, original_max_position_embeddings=24, mscale=0.7, mscale_all_dim=0.9)

FAMILIES: list[Family] = [
    Family("llama", "LlamaForCausalLM"),
    Family("llama-tied", "LlamaForCausalLM", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    Family("llama-bias", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    Family("llama-head-dim", "LlamaForCausalLM", {"head_dim": 24, "num_key_value_heads": 4}),
    Family("llama-gelu", "LlamaForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}),
    Family("llama-linear", "LlamaForCausalLM", rope("linear", factor=3.0)),
    Family("llama-dynamic", "LlamaForCausalLM", rope("dynamic", factor=2.0)),
    Family(
        "llama-dynamic-long", "LlamaForCausalLM", {**rope("dynamic", factor=2.0), "max_position_embeddings": 24}, 41
    ),
    Family(
        "llama-llama3",
        "LlamaForCausalLM",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32),
    ),
    Family("llama-yarn", "LlamaForCausalLM", rope("yarn", factor=4.0, original_max_position_embeddings=24)),
    Family(
        "llama-yarn-exact",
        "LlamaForCausalLM",
        rope("yarn", factor=4.0, original_max_position_embeddings=24, truncate=False, beta_fast=16, beta_slow=2),
    ),
    Family(
        "llama-yarn-mscale",
        "LlamaForCausalLM",
        rope("yarn", factor=4.0, original_max_position_embeddings=24, mscale=1.0, mscale_all_dim=0.7),
    ),
    Family(
        "llama-yarn-factor",
        "LlamaForCausalLM",
        rope("yarn", factor=4.0, original_max_position_embeddings=24, attention_factor=1.3),
    ),
    Family(
        "llama-longrope",
        "LlamaForCausalLM",
        rope("longrope", original_max_position_embeddings=24, factor=4.0, **_LONG),
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
            **rope("longrope", partial_rotary_factor=1.0, original_max_position_embeddings=48, **_LONG),
        },
        48,
    ),
    Family(
        "phi3-long-partial",
        "Phi3ForCausalLM",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 24,
            **rope(
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
        {**_GPT_OSS, **rope("yarn", factor=4.0, original_max_position_embeddings=24, truncate=False)},
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
    Family(
        "deepseek-v2",
        "DeepseekV2ForCausalLM",
        {**_LATENT, **_DEEPSEEK, **_LATENT_YARN, "topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    ),
    Family("deepseek-v2-lite", "DeepseekV2ForCausalLM", {**_LATENT, **_DEEPSEEK, "q_lora_rank": None}),
    Family(
        "deepseek-v3", "DeepseekV3ForCausalLM", {**_LATENT, **_DEEPSEEK, **_LATENT_YARN, "n_group": 3, "topk_group": 2}
    ),
    Family(
        "deepseek-v3-bias",
        "DeepseekV3ForCausalLM",
        {**_LATENT, **_DEEPSEEK, "n_group": 1, "topk_group": 1, "attention_bias": True, "rope_interleave": False},
    ),
    Family("glm4-moe-lite", "Glm4MoeLiteForCausalLM", {**_LATENT, **_DEEPSEEK, "v_head_dim": 16}),
    Family(
        "deepseek-v32", "DeepseekV32ForCausalLM", {**_LATENT, **_DEEPSEEK, **_INDEXER, "n_group": 3, "topk_group": 2}
    ),
    Family("glm-moe-dsa", "GlmMoeDsaForCausalLM", {**_LATENT, **_DEEPSEEK, **_INDEXER}),
    Family(
        "mistral4",
        "Mistral4ForCausalLM",
        {
            **_LATENT,
            **_DEEPSEEK,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.4,
                max_position_embeddings=96,
                partial_rotary_factor=0.4,
            ),
        },
    ),
    Family("youtu", "YoutuForCausalLM", {**_LATENT, "tie_word_embeddings": True}),
    Family("minicpm3", "MiniCPM3ForCausalLM", {**_LATENT, "scale_emb": 3.0, "scale_depth": 1.2, "dim_model_base": 32}),
    Family("solar-open", "SolarOpenForCausalLM", {**_DEEPSEEK, "head_dim": 16}),
    Family(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 24, "rotary_dim": 12},
    ),
]


FAMILIES += ROWS


def _hybrid(name: str, architecture: str, fields: dict[str, Any], fused: dict[str, int], lowering: str) -> Family:
    """A row with recurrent layers."""
    return Family(name, architecture, {"pad_token_id": 0, **fields}, fused=fused, lowering=lowering, has_state=True)


_SCAN = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
}
_GRANITE4 = {**_GRANITE, **_SCAN, "layer_types": ["mamba", "attention", "mamba"], "shared_intermediate_size": 48}
_FALCON_FACTORS = {
    "mlp_multipliers": [0.7, 1.3],
    "ssm_multipliers": [0.5, 0.6, 0.7, 0.8, 0.9],
    "key_multiplier": 0.5,
    "attention_in_multiplier": 1.1,
    "attention_out_multiplier": 0.8,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.2,
    "embedding_multiplier": 2.0,
    "lm_head_multiplier": 0.5,
}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2}
_NEMOTRON_MOE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "routed_scaling_factor": 1.5,
}
_LFM = {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 16}

FAMILIES += [
    _hybrid(
        "lfm2",
        "Lfm2ForCausalLM",
        _LFM,
        {"rope_write_kv": 1, "linear_add": 6, "norm_gated_linear": 3, "norm_linear": 3},
        "mul",
    ),
    _hybrid(
        "lfm2-bias",
        "Lfm2ForCausalLM",
        {
            "full_attn_idxs": [0],
            "conv_bias": True,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
            "conv_L_cache": 4,
        },
        {"rope_write_kv": 1, "linear_add": 6, "norm_gated_linear": 3, "norm_linear": 3},
        "mul",
    ),
    _hybrid(
        "lfm2-moe",
        "Lfm2MoeForCausalLM",
        {
            **_LFM,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "num_dense_layers": 1,
            "routed_scaling_factor": 1.4,
        },
        {"rope_write_kv": 1, "experts_add": 2, "linear_add": 4, "norm_gated_linear": 1, "norm_linear": 3},
        "mul",
    ),
    _hybrid(
        "mamba2",
        "Mamba2ForCausalLM",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
        {"linear_add": 3, "norm_linear": 3},
        "GatedRMSNorm",
    ),
    _hybrid(
        "mamba2-bias",
        "Mamba2ForCausalLM",
        {
            "num_heads": 4,
            "head_dim": 32,
            "state_size": 24,
            "n_groups": 1,
            "use_bias": True,
            "time_step_limit": [0.3, 0.8],
            "tie_word_embeddings": True,
        },
        {"linear_add": 3, "norm_linear": 3},
        "GatedRMSNorm",
    ),
    _hybrid(
        "granite4",
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE4, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"norm_linear": 1, "add_rms_norm": 6},
        "GatedRMSNorm",
    ),
    _hybrid(
        "granite4-dense",
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE4, "num_local_experts": 0, "num_experts_per_tok": 0, "position_embedding_type": "rope"},
        {"rope_write_kv": 1, "norm_gated_linear": 3, "norm_linear": 1, "add_rms_norm": 3},
        "GatedRMSNorm",
    ),
    _hybrid(
        "bamba",
        "BambaForCausalLM",
        {**_SCAN, "mamba_n_groups": 1, "attn_layer_indices": [1]},
        {"rope_write_kv": 1, "linear_add": 6, "norm_gated_linear": 3, "norm_linear": 3},
        "GatedRMSNorm",
    ),
    _hybrid(
        "nemotron-h",
        "NemotronHForCausalLM",
        {**_NEMOTRON, "hybrid_override_pattern": "M-M*-", "num_hidden_layers": 5, "head_dim": 24},
        {"linear_add": 5, "norm_linear": 5},
        "GatedRMSNorm",
    ),
    _hybrid(
        "nemotron-h-moe",
        "NemotronHForCausalLM",
        {**_NEMOTRON, **_NEMOTRON_MOE, "hybrid_override_pattern": "ME*E", "num_hidden_layers": 4, "head_dim": 16},
        {"linear_add": 2, "norm_linear": 1, "add_rms_norm": 2},
        "GatedRMSNorm",
    ),
    _hybrid(
        "nemotron-h-latent",
        "NemotronHForCausalLM",
        {
            **_NEMOTRON,
            **_NEMOTRON_MOE,
            "layers_block_type": ["mamba", "moe", "attention"],
            "moe_latent_size": 24,
            "head_dim": 16,
            "use_bias": True,
        },
        {"linear_add": 2, "norm_linear": 1, "add_rms_norm": 1},
        "GatedRMSNorm",
    ),
    _hybrid(
        "falcon-h1",
        "FalconH1ForCausalLM",
        {
            **_SCAN,
            **_FALCON_FACTORS,
            "mamba_d_ssm": 96,
            "mamba_d_head": 24,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
        },
        {"add_rms_norm": 6},
        "mul",
    ),
    _hybrid("falcon-h1-plain", "FalconH1ForCausalLM", {**_SCAN, "mamba_d_ssm": 128}, {"add_rms_norm": 6}, "mul"),
    _hybrid(
        "falcon-h1-gated-last",
        "FalconH1ForCausalLM",
        {**_SCAN, "mamba_d_ssm": 128, "mamba_rms_norm": True},
        {"add_rms_norm": 6},
        "mul",
    ),
    _hybrid(
        "mamba",
        "MambaForCausalLM",
        {"state_size": 8, "intermediate_size": 128, "time_step_rank": 5},
        {"linear_add": 3, "norm_linear": 3},
        "ShortConv",
    ),
    _hybrid(
        "falcon-mamba",
        "FalconMambaForCausalLM",
        {"state_size": 8, "use_bias": True},
        {"linear_add": 3, "norm_linear": 3},
        "ShortConv",
    ),
    _hybrid(
        "jamba",
        "JambaForCausalLM",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "mamba_d_state": 8,
            "mamba_dt_rank": 5,
        },
        {"experts_add": 2, "linear_add": 6, "norm_gated_linear": 2, "norm_linear": 7},
        "ShortConv",
    ),
]

_DELTA: dict[str, Any] = {
    "pad_token_id": 0,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "num_hidden_layers": 4,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
}
_DELTA_EYES = {
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2, "out_hidden_size": 64}
}
_EXPERTS = {**_MOE, "shared_expert_intermediate_size": 24}
FAMILIES += [
    Family(
        "qwen3-next",
        "Qwen3NextForCausalLM",
        {**_DELTA, **_EXPERTS, "mlp_only_layers": [1]},
        fused={"rope_write_kv": 2, "linear_add": 5, "norm_gated_linear": 1, "norm_linear": 2, "add_rms_norm": 3},
        lowering="GatedHeadsNorm",
        has_state=True,
    ),
    Family(
        "qwen3.5",
        "Qwen3_5ForCausalLM",
        {**_DELTA, "linear_num_value_heads": 4, "attention_bias": True},
        fused={"rope_write_kv": 2, "linear_add": 8, "norm_gated_linear": 4, "norm_linear": 4},
        lowering="GatedHeadsNorm",
        has_state=True,
    ),
    Family(
        "qwen3.5-ends-linear",
        "Qwen3_5ForCausalLM",
        {**_DELTA, "num_hidden_layers": 3, "layer_types": ["linear_attention", "full_attention", "linear_attention"]},
        fused={"rope_write_kv": 1, "linear_add": 6, "norm_gated_linear": 3, "norm_linear": 3},
        lowering="GatedHeadsNorm",
        has_state=True,
    ),
    Family(
        "qwen3.5-eyes",
        "Qwen3_5ForConditionalGeneration",
        _DELTA,
        outer=_DELTA_EYES,
        fused={"rope_write_kv": 2, "linear_add": 8, "norm_gated_linear": 4, "norm_linear": 4},
        lowering="GatedHeadsNorm",
        has_state=True,
    ),
    Family(
        "qwen3.5-moe",
        "Qwen3_5MoeForCausalLM",
        {**_DELTA, **_EXPERTS, "layer_types": None},
        fused={"rope_write_kv": 1, "linear_add": 4, "norm_linear": 1, "add_rms_norm": 4},
        lowering="GatedHeadsNorm",
        has_state=True,
    ),
    Family(
        "qwen3.5-moe-eyes",
        "Qwen3_5MoeForConditionalGeneration",
        {**_DELTA, **_EXPERTS},
        outer=_DELTA_EYES,
        fused={"rope_write_kv": 2, "linear_add": 4, "norm_linear": 1, "add_rms_norm": 4},
        lowering="GatedHeadsNorm",
        has_state=True,
    ),
]
