"""Gemma 4's router, and what it adds to each layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from samovar.layers import Embedding, Layer, Linear, Placement, RMSNorm, Router, Routing, Source
from samovar.models.config import DecoderConfig


class RouterNorm(RMSNorm):
    """The norm in front of the router, whose weight is stored as `scale` beside it, times the root of the width."""

    def sources(self) -> list[Source]:
        """The weight."""
        return [Source(self.stored(f"{self.path.rpartition('.')[0]}.scale"), self.weight)]

    def after_load(self) -> None:
        """Divide by the root once, in float32."""
        self.weight = self.weight.float() * self.dim**-0.5


class ExpertScale(Layer):
    """Each expert's weight times a learned number of its own."""

    is_row_wise = True

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = experts

    def bind(self, place: Placement) -> None:
        """Allocate the numbers."""
        self.weight = place.empty(self.experts, dtype=torch.float32)

    def sources(self) -> list[Source]:
        """The numbers, under the layer's own name."""
        return [Source(self.stored(self.path), self.weight)]

    def forward(self, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """weights float32, ids int32 [tokens, top_k] -> weights."""
        return weights * self.weight[ids.long()]


class Gemma4Router(nn.Module):
    """Norm, softmax over the chosen, and the experts' own scales."""

    def __init__(self, hidden: int, experts: int, top_k: int, eps: float) -> None:
        super().__init__()
        self.norm = RouterNorm(hidden, eps)
        self.proj = Router(hidden, experts, Routing(top_k=top_k))
        self.per_expert_scale = ExpertScale(experts)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [tokens, hidden] -> (weights float32 [tokens, top_k], ids int32 [tokens, top_k])."""
        weights, ids = self.proj(self.norm(x))
        scaled: torch.Tensor = self.per_expert_scale(weights, ids)
        return scaled, ids


class PartsRMSNorm(RMSNorm):
    """A norm of each run of `dim` columns."""

    is_row_wise = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, parts * dim] -> the same shape."""
        return self.normed(x.view(len(x), -1, self.dim)).view(x.shape)


def add_layer_inputs(trunk: nn.Module, c: DecoderConfig, width: int, vocab_size: int | None) -> None:
    """The layers that make what is added to each layer: a second embedding, and a projection of the first."""
    wide = c.num_hidden_layers * width
    trunk.embed_tokens_per_layer = Embedding(vocab_size or c.vocab_size, wide, scale=width**0.5)
    trunk.per_layer_model_projection = Linear(c.hidden_size, wide)
    trunk.per_layer_projection_norm = PartsRMSNorm(width, c.rms_norm_eps)


def layer_inputs(trunk: Any, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """x [tokens, hidden], the embedded `token_ids` [tokens] -> what is added to each layer [tokens, layers * width]."""
    projected = trunk.per_layer_model_projection(x) * trunk.per_layer_model_projection.in_features**-0.5
    both: torch.Tensor = trunk.per_layer_projection_norm(projected) + trunk.embed_tokens_per_layer(token_ids)
    inputs: torch.Tensor = both * 2.0**-0.5
    return inputs
