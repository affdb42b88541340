"""Turns a GGUF header into what config.json and generation_config.json would have said, family by family.

Keys are Hugging Face's. Nothing is guessed in silence: a required key that is missing, or one that describes a model
this table cannot express, is a `CheckpointError` naming the key.
"""

from __future__ import annotations

import math
import struct
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from samovar.config.gguf import GGUFHeader, GGUFTensor, StringArray
from samovar.errors import CheckpointError

END_OF_TURN = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<end_of_utterance>",
)
"""Control tokens that end an answer. Converters often store only one end id, so these are looked up by their text."""

END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>")

_CONTROL = 3
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
_LARGEST = 2**31 - 1
_MAX_ROPE_FACTORS = 4096


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-5 was stored as 9.999999747378752e-06."""
    if not math.isfinite(value):
        return value
    stored = struct.pack("<f", value)
    for digits in range(6, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == stored:
            return short
    return value


@dataclass(frozen=True, slots=True)
class _Keys:
    """Typed reading of one header's metadata; names under the architecture's prefix."""

    header: GGUFHeader
    architecture: str

    def fail(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.header.files[0]}: {message}")

    def raw(self, key: str) -> Any:
        return self.header.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.raw(key)
        if isinstance(value, array) and len(value) and len(set(value)) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        name = f"{self.architecture}.{key}"
        if value is None:
            raise self.fail(f"metadata {name!r} is missing")
        if isinstance(value, (array, list)):
            raise self.fail(f"metadata {name!r} differs from layer to layer, which is not supported")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _LARGEST:
            raise self.fail(f"metadata {name!r} must be an integer in [{least}, {_LARGEST}], got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float | None:
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.fail(f"metadata '{self.architecture}.{key}' must be a finite number, got {value!r}")
        return _shortest(float(value))

    def required(self, key: str) -> float:
        value = self.number(key)
        if value is None:
            raise self.fail(f"metadata '{self.architecture}.{key}' is missing")
        return value

    def has(self, tensor: str) -> bool:
        return tensor in self.header.tensors

    def factors(self, name: str) -> list[float] | None:
        """The values of a small float32 tensor that holds rotary factors, or None."""
        tensor = self.header.tensors.get(name)
        return None if tensor is None else _read_factors(self, tensor)


def _read_factors(keys: _Keys, tensor: GGUFTensor) -> list[float]:
    if tensor.type.name != "F32" or len(tensor.shape) != 1 or tensor.shape[0] > _MAX_ROPE_FACTORS:
        raise keys.fail(f"tensor {tensor.name!r} must be a short F32 vector, is {tensor.type.name} {tensor.shape}")
    try:
        with tensor.file.open("rb") as file:
            file.seek(tensor.offset)
            values = struct.unpack(f"<{tensor.shape[0]}f", file.read(tensor.nbytes))
    except (OSError, struct.error) as error:
        raise keys.fail(f"tensor {tensor.name!r} cannot be read: {error}") from error
    if not all(math.isfinite(v) and v > 0 for v in values):
        raise keys.fail(f"tensor {tensor.name!r} holds factors that are not positive numbers")
    return [_shortest(v) for v in values]


def _common(keys: _Keys, *, has_rms_norms: bool = True) -> dict[str, Any]:
    """The fields every family has."""
    hidden, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    head_dim = keys.integer("attention.key_length", hidden // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.fail(
            f"keys have {head_dim} and values {keys.raw('attention.value_length')} features a head; they must be equal"
        )
    if keys.integer("expert_count", 0, least=0):
        raise keys.fail(f"mixture-of-experts models are not supported yet ({keys.architecture}.expert_count is set)")
    return {
        "vocab_size": _vocab_size(keys),
        "hidden_size": hidden,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_hidden_layers": keys.integer("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.required(
            "attention.layer_norm_rms_epsilon" if has_rms_norms else "attention.layer_norm_epsilon"
        ),
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": not keys.has("output.weight"),
        **_rope(keys, head_dim),
    }


def _vocab_size(keys: _Keys) -> int:
    embedding = keys.header.tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    tokens = keys.header.metadata.get("tokenizer.ggml.tokens")
    return keys.integer("vocab_size", len(tokens) if isinstance(tokens, StringArray) else None)


def _rope(keys: _Keys, head_dim: int) -> dict[str, Any]:
    config: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    rotated = keys.integer("rope.dimension_count", head_dim)
    if rotated > head_dim:
        raise keys.fail(f"rope.dimension_count {rotated} is larger than the head dimension {head_dim}")
    if rotated != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    if (scaling := _rope_scaling(keys, rotated, config["rope_theta"])) is not None:
        config["rope_scaling"] = scaling
        if "original_max_position_embeddings" in scaling:
            config["original_max_position_embeddings"] = scaling["original_max_position_embeddings"]
    return config


def _rope_scaling(keys: _Keys, rotated: int, theta: float) -> dict[str, Any] | None:
    kind = keys.raw("rope.scaling.type") or ("linear" if keys.raw("rope.scale_linear") else "none")
    freqs, long, short = (keys.factors(f"rope_{name}.weight") for name in ("freqs", "factors_long", "factors_short"))
    for factors in (freqs, long, short):
        if factors is not None and len(factors) != rotated // 2:
            raise keys.fail(f"{len(factors)} rotary factors do not fit {rotated} rotated features")
    if kind == "longrope" or long is not None or short is not None:
        return _longrope(keys, long, short)
    if kind == "linear":
        factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear"))
        return {"rope_type": "linear", "factor": factor} if factor not in (None, 0.0, 1.0) else None
    if kind == "yarn":
        return _yarn(keys)
    if kind != "none":
        raise keys.fail(f"rope.scaling.type {kind!r} is not supported; none, linear, yarn and longrope are")
    return None if freqs is None else _frequency_factors(keys, freqs, rotated, theta)


def _yarn(keys: _Keys) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": keys.required("rope.scaling.factor"),
        "original_max_position_embeddings": keys.integer("rope.scaling.original_context_length"),
    }
    optional = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    for key, name in optional.items():
        if (value := keys.number(f"rope.scaling.{key}")) is not None:
            scaling[name] = value
    return scaling


def _longrope(keys: _Keys, long: list[float] | None, short: list[float] | None) -> dict[str, Any]:
    if long is None or short is None:
        raise keys.fail("longrope needs both tensors 'rope_factors_long.weight' and 'rope_factors_short.weight'")
    original = keys.integer("rope.scaling.original_context_length", keys.integer("context_length"))
    scaling: dict[str, Any] = {"rope_type": "longrope", "long_factor": long, "short_factor": short}
    scaling["original_max_position_embeddings"] = original
    scaling["factor"] = keys.integer("context_length") / original
    if (factor := keys.number("rope.scaling.attn_factor")) is not None:
        scaling["attention_factor"] = factor
    return scaling


def _frequency_factors(keys: _Keys, factors: list[float], rotated: int, theta: float) -> dict[str, Any] | None:
    """Name the rule behind a `rope_freqs.weight` tensor: Llama 3's if it gives these very factors.

    Otherwise the factors themselves, as longrope with one list for every length and no change of magnitude.
    """
    largest = max(factors)
    if largest == 1.0 == min(factors):
        return None
    for original in (8192, keys.integer("context_length")):
        rule = {
            "factor": largest,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": original,
        }
        if all(
            math.isclose(a, b, rel_tol=1e-5)
            for a, b in zip(factors, _llama3_factors(rule, rotated, theta), strict=True)
        ):
            return {"rope_type": "llama3", **rule}
    original = keys.integer("context_length")
    return {
        "rope_type": "longrope",
        "long_factor": factors,
        "short_factor": factors,
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": original,
    }


def _llama3_factors(rule: dict[str, Any], rotated: int, theta: float) -> list[float]:
    """What each rotary frequency is divided by under Llama 3's rule."""
    factors = []
    low, high, original = rule["low_freq_factor"], rule["high_freq_factor"], rule["original_max_position_embeddings"]
    for i in range(0, rotated, 2):
        turns = original / (2 * math.pi * theta ** (i / rotated))
        smooth = min(1.0, max(0.0, (turns - low) / (high - low)))
        factors.append(1 / ((1 - smooth) / rule["factor"] + smooth))
    return factors


def _llama(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _common(keys) | {"hidden_act": "silu"}
    config["attention_bias"] = keys.has("blk.0.attn_q.bias")
    config["mlp_bias"] = keys.has("blk.0.ffn_up.bias")
    if window := keys.integer("attention.sliding_window", 0, least=0):
        return "MistralForCausalLM", config | {"model_type": "mistral", "sliding_window": window}
    return "LlamaForCausalLM", config | {"model_type": "llama"}


def _qwen2(keys: _Keys) -> tuple[str, dict[str, Any]]:
    return "Qwen2ForCausalLM", _common(keys) | {
        "model_type": "qwen2",
        "hidden_act": "silu",
        "use_sliding_window": False,
    }


def _qwen3(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _common(keys) | {"model_type": "qwen3", "hidden_act": "silu", "use_sliding_window": False}
    return "Qwen3ForCausalLM", config | {"attention_bias": keys.has("blk.0.attn_q.bias")}


def _window_layers(keys: _Keys, num_layers: int, every: int) -> list[str]:
    """Which layers slide: the file's own list, or all but each `every`-th."""
    pattern = keys.raw("attention.sliding_window_pattern")
    if isinstance(pattern, (list, array)):
        if len(pattern) != num_layers:
            raise keys.fail(f"attention.sliding_window_pattern has {len(pattern)} entries for {num_layers} layers")
        slides = [bool(v) for v in pattern]
    else:
        period = keys.integer("attention.sliding_window_pattern", every)
        slides = [(i + 1) % period != 0 for i in range(num_layers)]
    return ["sliding_attention" if s else "full_attention" for s in slides]


def _gemma(keys: _Keys, *, every: int, largest: int) -> dict[str, Any]:
    """What Gemma 2 and 3 share. `largest` is the layer count of the 27B model, whose scores are scaled otherwise."""
    config = _common(keys) | {"hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    config["query_pre_attn_scalar"] = config["hidden_size"] // heads if layers == largest else config["head_dim"]
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping") or None
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping") or None
    config["layer_types"] = _window_layers(keys, layers, every)
    return config


def _gemma2(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _gemma(keys, every=2, largest=46) | {"model_type": "gemma2"}
    config["sliding_window"] = keys.integer("attention.sliding_window", 4096)
    return "Gemma2ForCausalLM", config


def _gemma3(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _gemma(keys, every=6, largest=62) | {"model_type": "gemma3_text"}
    config["rope_local_base_freq"] = keys.number("rope.freq_base_swa", 10000.0)
    if window := keys.integer("attention.sliding_window", 0, least=0):
        config["sliding_window"] = window
    else:
        config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    return "Gemma3ForCausalLM", config


def _phi3(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _common(keys) | {"model_type": "phi3", "hidden_act": "silu", "attention_bias": False}
    config["sliding_window"] = keys.integer("attention.sliding_window", 0, least=0) or None
    return "Phi3ForCausalLM", config


def _smollm3(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _common(keys) | {"model_type": "smollm3", "hidden_act": "silu", "use_sliding_window": False}
    config["attention_bias"], config["mlp_bias"] = keys.has("blk.0.attn_q.bias"), keys.has("blk.0.ffn_up.bias")
    config["no_rope_layer_interval"] = 4
    config["no_rope_layers"] = [int((i + 1) % 4 != 0) for i in range(config["num_hidden_layers"])]
    return "SmolLM3ForCausalLM", config


def _olmo2(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _common(keys) | {"model_type": "olmo2", "hidden_act": "silu", "attention_bias": False}
    if window := keys.integer("attention.sliding_window", 0, least=0):
        config |= {"model_type": "olmo3", "sliding_window": window}
        config["layer_types"] = _window_layers(keys, config["num_hidden_layers"], 4)
        return "Olmo3ForCausalLM", config
    return "Olmo2ForCausalLM", config


def _gemma1(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _common(keys) | {"model_type": "gemma", "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False}
    return "GemmaForCausalLM", config


def _glm4(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = {"partial_rotary_factor": 1.0, **_common(keys), "model_type": "glm4", "hidden_act": "silu"}
    return "Glm4ForCausalLM", config | {"attention_bias": keys.has("blk.0.attn_q.bias")}


def _ernie4_5(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _common(keys) | {"model_type": "ernie4_5", "hidden_act": "silu"}
    return "Ernie4_5ForCausalLM", config | {"use_bias": keys.has("blk.0.attn_q.bias")}


def _cohere2(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _common(keys, has_rms_norms=False) | {"model_type": "cohere2", "hidden_act": "silu"}
    config |= {"layer_norm_eps": config.pop("rms_norm_eps"), "logit_scale": keys.required("logit_scale")}
    config |= {
        "attention_bias": keys.has("blk.0.attn_q.bias"),
        "sliding_window": keys.integer("attention.sliding_window"),
    }
    config["layer_types"] = _window_layers(keys, config["num_hidden_layers"], 4)
    return "Cohere2ForCausalLM", config


def _exaone4(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _common(keys) | {"model_type": "exaone4", "hidden_act": "silu"}
    window = keys.integer("attention.sliding_window", 0, least=0) or None
    kinds = ["full_attention"] * config["num_hidden_layers"]
    config["layer_types"] = _window_layers(keys, len(kinds), 4) if window else kinds
    return "Exaone4ForCausalLM", config | {"sliding_window": window}


def _seed_oss(keys: _Keys) -> tuple[str, dict[str, Any]]:
    config = _common(keys) | {"model_type": "seed_oss", "hidden_act": "silu"}
    config |= {"attention_bias": keys.has("blk.0.attn_q.bias"), "mlp_bias": keys.has("blk.0.ffn_up.bias")}
    return "SeedOssForCausalLM", config | {"attention_out_bias": keys.has("blk.0.attn_output.bias")}


FAMILIES: dict[str, Callable[[_Keys], tuple[str, dict[str, Any]]]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "smollm3": _smollm3,
    "olmo2": _olmo2,
    "glm4": _glm4,
    "ernie4_5": _ernie4_5,
    "cohere2": _cohere2,
    "exaone4": _exaone4,
    "seed_oss": _seed_oss,
}
"""general.architecture -> what writes its config."""


def hf_config(header: GGUFHeader) -> dict[str, Any]:
    """config.json of a GGUF file. Raises `CheckpointError` for an architecture without a table."""
    architecture = header.metadata.get("general.architecture")
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        known = ", ".join(FAMILIES)
        raise CheckpointError(
            f"{header.files[0]}: GGUF architecture {architecture!r} is not supported; these are: {known}"
        )
    name, config = family(_Keys(header, str(architecture)))
    config["architectures"] = [name]
    for key, token in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        value = header.metadata.get(f"tokenizer.ggml.{token}_token_id")
        if isinstance(value, int) and value < config["vocab_size"]:
            config[key] = value
    return config


def hf_generation_config(header: GGUFHeader) -> dict[str, Any]:
    """Sampling defaults stored in a GGUF file, under generation_config.json's names."""
    metadata = header.metadata
    values = {
        name: metadata[key] for key, name in _SAMPLING_KEYS.items() if isinstance(metadata.get(key), (int, float))
    }
    return {name: _shortest(value) if isinstance(value, float) else value for name, value in values.items()}


def end_ids(header: GGUFHeader) -> list[int]:
    """Ids that end an answer: the ones the file names, and well-known control tokens found by their text."""
    named = (header.metadata.get(f"tokenizer.ggml.{token}_token_id") for token in ("eos", "eot", "eom"))
    ids = [value for value in named if isinstance(value, int)]
    tokens, types = header.metadata.get("tokenizer.ggml.tokens"), header.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, StringArray) and isinstance(types, array):
        found = (tokens.find(text) for text in END_OF_TURN + END_OF_TEXT)
        ids += [i for i in found if i is not None and i < len(types) and types[i] == _CONTROL]
    return list(dict.fromkeys(ids))
