"""What a row of the table of families is."""

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
    holds the class named like the architecture to compare with. `outer` are fields around those of a text model that
    stands in an object of its own. `fused` says how often fusions hold, where the usual rules do not say it; `lowering` a
    word of why a step cannot be one call of the CPU library; `has_state` that layers remember more than keys and values.
    """

    name: str
    architecture: str
    fields: dict[str, Any] = field(default_factory=dict)
    max_len: int | None = None
    reference: str = "transformers"
    outer: dict[str, Any] | None = None
    fused: dict[str, int] | None = None
    lowering: str = ""
    has_state: bool = False

    @property
    def raw(self) -> dict[str, Any]:
        return {**SMALL, **self.fields}

    @property
    def unlowered(self) -> str:
        """A word of why a step of this family cannot be one call of the CPU library; empty if it can."""
        if self.lowering:
            return self.lowering
        if "kv_lora_rank" in self.fields:
            return "latent"
        if "residual_multiplier" in self.fields:
            return "mul"
        return r"\((Router|Experts|RMSNorm)\)" if "num_experts_per_tok" in self.fields else ""


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    """Rope parameters as a row has them."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}
