"""Granite 3, dense and with experts. Read beside transformers/models/granite and granitemoe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.layers import Attention, ExpertStorage, ForwardBatch, GatedMLP
from samovar.models.config import DecoderConfig
from samovar.models.decoder import DecoderLM
from samovar.models.fields import num_layers
from samovar.models.llama import LlamaAttention, LlamaBlock
from samovar.models.mixture import MixtureConfig, mixture, softmax_routing, with_mixture

MULTIPLIERS = {
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """Factors of embeddings, of what is added to the stream, and of scores; `logits_scaling` divides logits."""

    embedding_multiplier: float
    logits_scaling: float
    residual_multiplier: float
    attention_multiplier: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteMoeConfig(MixtureConfig):
    """The same for a mixture."""

    embedding_multiplier: float
    logits_scaling: float
    residual_multiplier: float
    attention_multiplier: float


AnyGranite = GraniteConfig | GraniteMoeConfig


class GraniteAttention(LlamaAttention):
    """Llama's attention with a scale of its own."""

    def __init__(self, c: AnyGranite, layer: int) -> None:
        super().__init__(c, layer)
        heads, kv_heads = c.num_attention_heads, c.num_key_value_heads
        self.attn = Attention(heads, kv_heads, c.head_dim, scale=c.attention_multiplier)


class GraniteBlock(LlamaBlock):
    """Llama's block; what it adds to the stream is scaled."""

    attention = GraniteAttention

    def __init__(self, c: AnyGranite, layer: int) -> None:
        super().__init__(c, layer)
        self.factor = c.residual_multiplier

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLM`."""
        x, residual = self.input_layernorm(x, residual)
        x, residual = self.post_attention_layernorm(self.self_attn(x, batch) * self.factor, residual)
        return self.mlp(x) * self.factor, residual


class GraniteForCausalLM(DecoderLM):
    """Granite, dense."""

    block: ClassVar[type[nn.Module]] = GraniteBlock
    config_class: ClassVar[type[DecoderConfig]] = GraniteConfig
    config_defaults: ClassVar[dict[str, Any]] = MULTIPLIERS
    config: AnyGranite

    def embed_scale(self, config: DecoderConfig) -> float | None:
        """The embedding multiplier."""
        assert isinstance(config, AnyGranite)
        return config.embedding_multiplier

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] -> float32 [rows, vocab], scaled."""
        return super().logits(hidden) / self.config.logits_scaling


class GraniteMoeBlock(GraniteBlock):
    """Granite's block with experts; the checkpoint holds those of a layer in one tensor."""

    def __init__(self, c: GraniteMoeConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.mlp = mixture(c, softmax_routing(c), ExpertStorage(stacked=True))


class GraniteMoeForCausalLM(GraniteForCausalLM):
    """Granite with experts."""

    block: ClassVar[type[nn.Module]] = GraniteMoeBlock
    config_class = GraniteMoeConfig
    config_defaults = {**MULTIPLIERS, "num_experts_per_tok": 2}
    renames: ClassVar[dict[str, str]] = {
        "mlp.gate": "block_sparse_moe.router.layer",
        "mlp.experts.gate_up_proj": "block_sparse_moe.input_linear",
        "mlp.experts.down_proj": "block_sparse_moe.output_linear",
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers are mixtures, their experts as wide as `intermediate_size`."""
        values = {**cls.config_defaults, **raw, "norm_topk_prob": True}
        values["moe_intermediate_size"] = values.get("intermediate_size")
        return super().read_config(with_mixture(values, range(num_layers(values)), 8))


class GraniteMoeSharedBlock(GraniteMoeBlock):
    """The same with a network beside the experts, if the config has a width for it; gate and up are stored as one."""

    def __init__(self, c: GraniteMoeConfig, layer: int) -> None:
        super().__init__(c, layer)
        if c.shared_intermediate_size is not None:
            shared = GatedMLP(c.hidden_size, c.shared_intermediate_size, c.hidden_act, stored_fused=True)
            self.mlp = mixture(c, softmax_routing(c), ExpertStorage(stacked=True), shared)


class GraniteMoeSharedForCausalLM(GraniteMoeForCausalLM):
    """Granite with experts and a network beside them."""

    block = GraniteMoeSharedBlock
    renames = {
        "mlp.shared_experts.gate_up_proj": "shared_mlp.input_linear",
        "mlp.shared_experts.down_proj": "shared_mlp.output_linear",
        **GraniteMoeForCausalLM.renames,
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """A width of 0 is that of no network."""
        wide = raw.get("shared_intermediate_size", 1024)
        return super().read_config({**raw, "shared_intermediate_size": None if wide == 0 else wide})
