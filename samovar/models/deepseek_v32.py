"""DeepSeek V3.2 and GLM-5, whose queries attend to some of the keys, as far as these are all keys.

An indexer scores every key, and attention goes to the `index_topk` best of them. Sequences that are no longer than that see
all keys, whatever the scores: they are served as DeepSeek V3 is. Longer ones are refused. Read beside
transformers/models/deepseek_v32 and glm_moe_dsa.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samovar.errors import ConfigError
from samovar.layers import Layer, Placement
from samovar.models.config import DecoderConfig
from samovar.models.deepseek_v2 import LatentMixtureConfig
from samovar.models.deepseek_v3 import DeepseekV3Block, DeepseekV3ForCausalLM, Glm4MoeLiteForCausalLM
from samovar.models.latent import LatentSelfAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class SparseLatentConfig(LatentMixtureConfig):
    """`index_topk`: keys that a query attends to."""

    index_topk: int = 2048


class Indexer(Layer):
    """Scores keys, which makes no difference up to `most` of them: its weights are left unread."""

    tensors = ("wq_b.weight", "wk.weight", "k_norm.weight", "k_norm.bias", "weights_proj.weight")

    def __init__(self, most: int, longest: int) -> None:
        super().__init__()
        self.most, self.longest = most, longest

    def bind(self, place: Placement) -> None:
        """Raises `ConfigError` for sequences that are longer."""
        length = place.max_model_len or self.longest
        if length > self.most:
            raise ConfigError(
                f"--max-model-len {length}: {self.path} would choose among more than {self.most} keys, which is not supported "
                f"yet: use --max-model-len {self.most}"
            )

    def unread(self) -> set[str]:
        """See `Layer`."""
        names = {self.stored(f"{self.path}.{name}") for name in self.tensors}
        return names | {f"{name}_scale_inv" for name in names if name.endswith("weight")}


class SparseLatentAttention(LatentSelfAttention):
    """Latent attention with an indexer."""

    def __init__(self, c: SparseLatentConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.indexer = Indexer(c.index_topk, c.max_position_embeddings)


class DeepseekV32Block(DeepseekV3Block):
    """Latent attention, and experts in all but the first layers."""

    attention = SparseLatentAttention


class DeepseekV32ForCausalLM(DeepseekV3ForCausalLM):
    """DeepSeek V3.2."""

    block = DeepseekV32Block
    config_class = SparseLatentConfig

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers are alike, whatever they are called."""
        return super().read_config({**raw, "layer_types": None})


class GlmMoeDsaForCausalLM(Glm4MoeLiteForCausalLM):
    """GLM-5."""

    block = DeepseekV32Block
    config_class = SparseLatentConfig
    config_defaults = {
        **Glm4MoeLiteForCausalLM.config_defaults,
        "q_lora_rank": 2048,
        "first_k_dense_replace": 3,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5,
    }
    default_experts = 256

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers are alike, whatever they are called."""
        return super().read_config({**raw, "layer_types": None})
