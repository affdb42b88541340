"""What published config.json files of models that see leave out of their text model, by architecture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "Gemma3ForConditionalGeneration": {
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131_072,
    },
}
"""Such files hold only what differs from these."""


def text_defaults(config: Mapping[str, Any]) -> dict[str, Any]:
    """The entry of a config.json's architecture; empty where files are complete."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    return dict(TEXT_DEFAULTS.get(name, {})) if isinstance(name, str) else {}
