"""Phi-3.5-MoE. Read beside transformers/models/phimoe/modeling_phimoe.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from samovar.errors import CheckpointError
from samovar.layers import Experts, Router, Routing, SparseMLP
from samovar.models.config import FULL, SLIDING, DecoderConfig
from samovar.models.fields import integer, num_layers
from samovar.models.mixtral import MIXTRAL_NAMES
from samovar.models.mixture import MixtureConfig, with_mixture
from samovar.models.starcoder2 import LayerNormBlock, LayerNormLM


@dataclass(frozen=True, slots=True, kw_only=True)
class PhimoeConfig(MixtureConfig):
    """`router_jitter_noise`: how far, in parts, a score may be below the best to count; `lm_head_bias`."""

    router_jitter_noise: float = 0.01
    lm_head_bias: bool = False


class SparseMixer(Router):
    """Two experts, one after the other: each is the best of those that are left, and weighs what a softmax over it and
    those near it gives (SparseMixer-v2, Liu et al., 2024)."""

    is_row_wise = True

    def __init__(self, hidden: int, experts: int, jitter: float) -> None:
        super().__init__(hidden, experts, Routing(top_k=2))
        self.jitter = jitter

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """x [tokens, hidden] -> (weights float32 [tokens, 2], ids int32 [tokens, 2])."""
        scores = self.quant.logits(x, self.weights)
        first_weight, first = self._best(scores, scores)
        second_weight, second = self._best(scores, scores.scatter(-1, first, -torch.inf))
        return torch.cat((first_weight, second_weight), -1), torch.cat((first, second), -1).to(torch.int32)

    def _best(self, scores: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The best of `left`, and its share among those that are not much worse."""
        most, best = left.max(dim=-1, keepdim=True)
        is_far = (most - scores) / scores.abs().clamp(min=most) > 2 * self.jitter
        return left.masked_fill(is_far, -torch.inf).softmax(-1).gather(-1, best), best


class PhimoeBlock(LayerNormBlock):
    """Attention and experts, each behind a layer norm."""

    def __init__(self, c: PhimoeConfig, layer: int) -> None:
        super().__init__(c, layer)
        self.mlp = SparseMLP(
            SparseMixer(c.hidden_size, c.num_experts, c.router_jitter_noise),
            Experts(c.hidden_size, c.moe_intermediate_size, c.num_experts, c.hidden_act),
        )


class PhimoeForCausalLM(LayerNormLM):
    """Phi-3.5-MoE."""

    block = PhimoeBlock
    epsilon = "rms_norm_eps"
    config_class = PhimoeConfig
    config_defaults: ClassVar[dict[str, Any]] = {"num_experts_per_tok": 2, "rope_theta": 1_000_000.0}
    renames = MIXTRAL_NAMES

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """All layers are mixtures, and slide if there is a window; a token has two experts."""
        values = {**cls.config_defaults, **raw}
        if integer(values, "num_experts_per_tok") != 2:
            raise CheckpointError(
                f"config.json: num_experts_per_tok {values['num_experts_per_tok']} is not supported: only 2 is"
            )
        kind = FULL if values.get("sliding_window") is None else SLIDING
        values |= {"layer_types": [kind] * num_layers(values)}
        values["moe_intermediate_size"] = values.get("intermediate_size")
        return super().read_config(with_mixture(values, range(num_layers(values)), 16))

    def has_head_bias(self, config: DecoderConfig) -> bool:
        """See `DecoderLM`."""
        assert isinstance(config, PhimoeConfig)
        return config.lm_head_bias
