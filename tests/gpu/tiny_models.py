"""Tiny checkpoints with head sizes that GPU kernels serve: a Llama, a Qwen 3 (q/k-norm, tied), the same with experts, a
Gemma 2 (window, soft caps), a Qwen 3.5 (gated delta net), a Mamba 2 without attention, a DeepSeek V3 (latent attention)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

from samovar.kernels.op import Kernels, Target
from samovar.layers.layer import Layer, Placement, bind
from samovar.models.registry import build
from tests.checkpoints import shapes

VOCAB = 1003
"""No multiple of anything: the last tile of every kernel is a partial one."""

COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCAB,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float32",
    "tie_word_embeddings": True,
}

KINDS: dict[str, dict[str, Any]] = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "head_dim": 128,
        "num_key_value_heads": 4,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "norm_topk_prob": True,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 64,
        "sliding_window": 40,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 12.0,
    },
    "qwen3_5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_heads": 8,
        "state_size": 64,
        "n_groups": 2,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "num_key_value_heads": 4,
        "kv_lora_rank": 128,
        "q_lora_rank": 96,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
    },
}
"""What differs from `COMMON`."""
DECLARED = ("qwen3_5", "mamba2", "deepseek_v3")
"""Kinds whose tensors are those that the model says it reads: their names are compared with Transformers' elsewhere."""


def declared_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape, as the family reads them."""
    model = build(config["architectures"][0], config)
    kernels = Kernels(Target("cpu", "", torch.float32), "cpu")
    bind(model, Placement(dtype=torch.float32, device=torch.device("meta"), kernels=kernels))
    layers = [layer for layer in model.modules() if isinstance(layer, Layer)]
    found: dict[str, tuple[int, ...]] = {}
    for source in (source for layer in layers for source in layer.sources()):
        parts = {source.axis: source.shard[1]}
        found[source.name] = tuple(size * parts.get(axis, 1) for axis, size in enumerate(source.target.shape))
    return found


def model_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape."""
    if config["model_type"].removesuffix("_text") in DECLARED:
        return declared_shapes(config)
    found = shapes(config)
    if config["tie_word_embeddings"]:
        del found["lm_head.weight"]
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        if config["model_type"] == "qwen3_moe":
            for part in ("gate", "up", "down"):
                rows, columns = found.pop(f"{layer}mlp.{part}_proj.weight")
                narrow = (
                    (config["moe_intermediate_size"], columns)
                    if part != "down"
                    else (rows, config["moe_intermediate_size"])
                )
                for expert in range(config["num_experts"]):
                    found[f"{layer}mlp.experts.{expert}.{part}_proj.weight"] = narrow
            found[f"{layer}mlp.gate.weight"] = (config["num_experts"], config["hidden_size"])
        if config["model_type"] in ("qwen3", "qwen3_moe"):
            for name in ("q_norm", "k_norm"):
                found[f"{layer}self_attn.{name}.weight"] = (config["head_dim"],)
        if config["model_type"] == "gemma2":
            for name in ("pre_feedforward_layernorm", "post_feedforward_layernorm"):
                found[f"{layer}{name}.weight"] = (config["hidden_size"],)
    return found


def write_model(folder: Path, kind: str, seed: int = 3) -> Path:
    """Random float32 weights, in which layers count for more than the last token's own embedding."""
    config = {**COMMON, **KINDS[kind]}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rng, tensors = np.random.default_rng(seed), {}
    center = 0.0 if kind in ("gemma2", "qwen3_5") else 1.0
    hidden = config["hidden_size"]
    for name, shape in model_shapes(config).items():
        if name.endswith(("A_log", "dt_bias")):
            values = rng.standard_normal(shape) - 3.0  # states are kept for tens of tokens
        elif name.endswith("e_score_correction_bias"):
            values = 0.05 * rng.standard_normal(shape)
        elif len(shape) == 1:
            # A tied head of small embeddings needs a large last norm, or all tokens were nearly equally likely.
            last = 8.0 if config["tie_word_embeddings"] and name == "model.norm.weight" else 1.0
            values = last * (1 + 0.1 * rng.standard_normal(shape)) - (1.0 - center)
        elif name.endswith(("embed_tokens.weight", "embeddings.weight")):
            size = (
                1.0 if kind == "llama" or kind in DECLARED else 0.3 if kind.startswith("qwen3") else 0.1 / hidden**0.5
            )
            values = size * rng.standard_normal(shape)
        else:
            values = 1.7 * rng.standard_normal(shape) / np.sqrt(shape[-1])
        tensors[name] = values.astype(np.float32)
    if kind == "gemma2":
        tensors["model.norm.weight"] += 40.0
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder
