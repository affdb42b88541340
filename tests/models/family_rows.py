"""Rows of families without recurrent state: the long tail of dense ones, and mixtures; see `family_table`."""

from __future__ import annotations

from tests.models.family import Family, rope

_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 20, "sliding_window": 7}
_GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2}
_WINDOW = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 6}
_EYES = {
    "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "sliding_window": 7,
    "head_dim": 16,
    "global_head_dim": 24,
    "vocab_size_per_layer_input": 140,
    "hidden_size_per_layer_input": 12,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "tie_word_embeddings": True,
}
_GEMMA3N = {
    **{name: _GEMMA4[name] for name in _GEMMA4 if name not in ("global_head_dim", "use_double_wide_mlp")},
    "intermediate_size": [96, 80, 96, 96, 64, 96],
    "activation_sparsity_pattern": [0.8, 0.0, 0.5, 0.0, 0.0, 0.3],
    "laurel_rank": 10,
    "altup_num_inputs": 3,
    "vocab_size_per_layer_input": 120,
}
_LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size_mlp": 112,
    "num_local_experts": 4,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 7,
    "floor_scale": 4,
    "no_rope_layer_interval": 3,
}
_ERNIE_MOE = {
    "moe_num_experts": 4,
    "moe_k": 2,
    "moe_intermediate_size": 40,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
_NO_NORM = "LayerNorm"
"""Layer norms have no instruction."""

_USUAL = {"rope_write_kv": 3, "linear_add": 6, "norm_gated_linear": 3, "norm_linear": 3}
"""Fusions of a Llama of three layers."""

ROWS: list[Family] = [
    Family("gemma", "GemmaForCausalLM", {"head_dim": 24, "tie_word_embeddings": True}, fused=_USUAL),
    Family(
        "gemma3-eyes",
        "Gemma3ForConditionalGeneration",
        {**_GEMMA, "num_hidden_layers": 3, "tie_word_embeddings": True},
        outer={**_EYES, "mm_tokens_per_image": 4},
    ),
    Family(
        "gemma4",
        "Gemma4ForCausalLM",
        _GEMMA4,
        fused={"norm_gated_linear": 6, "norm_linear": 4},
        lowering="PartsRMSNorm",
    ),
    Family(
        "gemma4-equal",
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "final_logit_softcapping": 4.0,
        },
        fused={"norm_gated_linear": 6, "norm_linear": 6},
        lowering="known way",
    ),
    Family(
        "gemma4-eyes",
        "Gemma4ForConditionalGeneration",
        _GEMMA4,
        outer=_EYES,
        fused={"norm_gated_linear": 6, "norm_linear": 4},
        lowering="PartsRMSNorm",
    ),
    Family(
        "gemma3n",
        "Gemma3nForCausalLM",
        _GEMMA3N,
        fused={"norm_gated_linear": 3, "norm_linear": 3},
        lowering="embed_tokens_per_layer",
    ),
    Family(
        "gemma3n-eyes",
        "Gemma3nForConditionalGeneration",
        {**_GEMMA3N, "activation_sparsity_pattern": [0.0] * 6, "altup_active_idx": 1},
        reference="tests.models.gemma3n_reference",
        fused={"norm_gated_linear": 6},
        lowering="embed_tokens_per_layer",
    ),
    Family(
        "afmoe",
        "AfmoeForCausalLM",
        {
            "head_dim": 24,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "route_scale": 1.7,
            "mup_enabled": True,
            **_WINDOW,
        },
        fused={"rope_write_kv": 2, "norm_gated_linear": 1, "add_rms_norm": 5},
        lowering="mul",
    ),
    Family("phi", "PhiForCausalLM", {}, fused={"rope_write_kv": 3}, lowering=_NO_NORM),
    Family("phi-norms", "PhiForCausalLM", {"qk_layernorm": True}, fused={}, lowering=_NO_NORM),
    Family(
        "internlm3",
        "InternLM3ForCausalLM",
        {"head_dim": 24, "qkv_bias": True, "bias": True},
        reference="tests.models.internlm3_reference",
    ),
    Family("ministral", "MinistralForCausalLM", {**_WINDOW, "head_dim": 24}),
    Family(
        "ministral3",
        "Ministral3ForCausalLM",
        {
            "head_dim": 24,
            "pad_token_id": 0,
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=8,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.3,
            ),
        },
        fused={**_USUAL, "rope_write_kv": 0},
        lowering="known way",
    ),
    Family(
        "mistral3-eyes",
        "Mistral3ForConditionalGeneration",
        {"head_dim": 24, "model_type": "mistral", "rope_theta": 10000.0, "sliding_window": None},
        outer={"vision_config": {"model_type": "pixtral", **_EYES["vision_config"]}, "tie_word_embeddings": False},
    ),
    Family(
        "llama4",
        "Llama4ForCausalLM",
        _LLAMA4,
        fused={"linear_add": 6, "norm_gated_linear": 2, "norm_linear": 3, "add_rms_norm": 2},
        lowering="known way",
    ),
    Family(
        "llama4-eyes",
        "Llama4ForConditionalGeneration",
        {**_LLAMA4, "use_qk_norm": False, "attn_temperature_tuning": False, "moe_layers": [1]},
        outer={
            "vision_config": {
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
                "image_size": 28,
                **_EYES["vision_config"],
            }
        },
        fused={"rope_write_kv": 3, "linear_add": 7, "norm_gated_linear": 3, "norm_linear": 3, "add_rms_norm": 1},
        lowering="chunks",
    ),
    Family("olmo3", "Olmo3ForCausalLM", {**_WINDOW, "pad_token_id": 0}, fused={"add_rms_norm": 1}),
    Family("olmo", "OlmoForCausalLM", {"pad_token_id": 0, "clip_qkv": 0.8}, fused={}, lowering="LayerNorm"),
    Family("seed-oss", "SeedOssForCausalLM", {"head_dim": 24, "attention_out_bias": True}),
    Family("ernie4-5", "Ernie4_5ForCausalLM", {"head_dim": 24, "use_bias": True, "tie_word_embeddings": True}),
    Family(
        "ernie4-5-moe",
        "Ernie4_5_MoeForCausalLM",
        _ERNIE_MOE,
        fused={**_USUAL, "linear_add": 4, "norm_gated_linear": 1, "norm_linear": 2, "add_rms_norm": 2},
    ),
    Family(
        "exaone4",
        "Exaone4ForCausalLM",
        {"sliding_window": 6, "sliding_window_pattern": 3},
        fused={"rope_write_kv": 2, "add_rms_norm": 1},
    ),
    Family(
        "exaone4-full",
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 3},
        fused={"rope_write_kv": 3, "add_rms_norm": 1},
    ),
    Family(
        "cohere",
        "CohereForCausalLM",
        {"logit_scale": 0.3, "tie_word_embeddings": True},
        fused={"rope_write_kv": 3},
        lowering=_NO_NORM,
    ),
    Family(
        "cohere-norms",
        "CohereForCausalLM",
        {"use_qk_norm": True, "attention_bias": True},
        fused={},
        lowering=_NO_NORM,
    ),
    Family(
        "cohere2",
        "Cohere2ForCausalLM",
        {**_WINDOW, "attention_bias": True},
        fused={"rope_write_kv": 2},
        lowering=_NO_NORM,
    ),
    Family("glm", "GlmForCausalLM", {"head_dim": 24, "pad_token_id": 0}),
    Family(
        "glm4",
        "Glm4ForCausalLM",
        {"head_dim": 16, "attention_bias": False, "pad_token_id": 0},
        fused={**_USUAL, "linear_add": 0, "norm_linear": 1, "add_rms_norm": 3},
    ),
    Family(
        "hunyuan",
        "HunYuanDenseV1ForCausalLM",
        {"head_dim": 24},
        lowering="known way",
        fused={**_USUAL, "rope_write_kv": 0},
    ),
    Family(
        "hunyuan-moe",
        "HunYuanMoEV1ForCausalLM",
        {"num_experts": 4, "moe_topk": 2, "head_dim": 16, "num_experts_per_tok": 2},
        lowering="known way",
        fused={"linear_add": 3, "norm_linear": 1, "add_rms_norm": 3},
    ),
    Family(
        "arcee",
        "ArceeForCausalLM",
        {"mlp_bias": True},
        fused={"rope_write_kv": 3, "linear_add": 6, "norm_linear": 6},
        lowering="Activation",
    ),
    Family(
        "apertus",
        "ApertusForCausalLM",
        {"tie_word_embeddings": True, "hidden_act": "xielu"},
        fused={"rope_write_kv": 3, "linear_add": 6, "norm_linear": 6},
        lowering="ExpandedIntegral",
    ),
    Family("starcoder2", "Starcoder2ForCausalLM", {"sliding_window": 6}, fused={"rope_write_kv": 3}, lowering=_NO_NORM),
    Family(
        "stablelm",
        "StableLmForCausalLM",
        {"use_qkv_bias": True, "qk_layernorm": True},
        fused={},
        lowering=_NO_NORM,
    ),
    Family(
        "stablelm-parallel",
        "StableLmForCausalLM",
        {"use_parallel_residual": True},
        fused={"rope_write_kv": 3},
        lowering=_NO_NORM,
    ),
    Family(
        "nemotron",
        "NemotronForCausalLM",
        {"head_dim": 24, "mlp_bias": True},
        fused={"rope_write_kv": 3},
        lowering=_NO_NORM,
    ),
    Family(
        "granitemoe-shared",
        "GraniteMoeSharedForCausalLM",
        {**_GRANITE, "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 40},
        fused={"rope_write_kv": 3, "norm_linear": 1, "add_rms_norm": 6},
    ),
    Family(
        "phimoe",
        "PhimoeForCausalLM",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "attention_bias": True,
            "lm_head_bias": True,
            "router_jitter_noise": 0.2,
        },
        fused={"rope_write_kv": 3},
        lowering=_NO_NORM,
    ),
]
