"""Gemma 4: the text model, alone or beside what sees and hears. Read beside transformers/models/gemma4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.layers import (
    Activation,
    AddRMSNorm,
    Columns,
    Experts,
    ExpertStorage,
    ForwardBatch,
    GatedMLP,
    Linear,
    RMSNorm,
    Scalar,
)
from samovar.models.config import DecoderConfig
from samovar.models.decoder import EYES, TEXT_ONLY, DecoderLM
from samovar.models.fields import text_fields
from samovar.models.gemma4_attention import Gemma4Attention, Gemma4SharedAttention
from samovar.models.gemma4_config import Gemma4Config, with_layers
from samovar.models.gemma4_parts import Gemma4Router, add_layer_inputs, layer_inputs


class Gemma4Block(nn.Module):
    """Sandwich norms around attention and MLP, experts beside the MLP, and what is added to each layer; then one factor
    for the whole stream."""

    def __init__(self, c: Gemma4Config, layer: int) -> None:
        super().__init__()
        hidden, eps = c.hidden_size, c.rms_norm_eps
        self.self_attn = (Gemma4SharedAttention if c.is_shared(layer) else Gemma4Attention)(c, layer)
        self.mlp = GatedMLP(hidden, c.mlp_width(layer), c.hidden_act)
        self.input_layernorm = AddRMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = AddRMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.layer_scalar = Scalar()
        self.experts: Experts | None = None
        if c.num_experts is not None and c.top_k_experts is not None and c.moe_intermediate_size is not None:
            self.router = Gemma4Router(hidden, c.num_experts, c.top_k_experts, eps)
            storage = ExpertStorage(stacked=True, bare=True)
            self.experts = Experts(hidden, c.moe_intermediate_size, c.num_experts, c.hidden_act, storage=storage)
            self.pre_feedforward_layernorm_2 = RMSNorm(hidden, eps)
            self.post_feedforward_layernorm_1 = RMSNorm(hidden, eps)
            self.post_feedforward_layernorm_2 = RMSNorm(hidden, eps)
        self.adds_input = c.hidden_size_per_layer_input is not None
        if c.hidden_size_per_layer_input is not None:
            width = c.hidden_size_per_layer_input
            self.own_input = Columns(layer * width, width)
            self.act_fn = Activation(c.hidden_act)
            self.per_layer_input_gate = Linear(hidden, width)
            self.per_layer_projection = Linear(width, hidden)
            self.post_per_layer_input_norm = RMSNorm(hidden, eps)

    def forward(self, x: torch.Tensor, batch: ForwardBatch, inputs: torch.Tensor | None) -> torch.Tensor:
        """x [tokens, hidden] and what is added to all layers [tokens, layers * width] -> x."""
        x, residual = self.input_layernorm(x, None)
        x = self.post_attention_layernorm(self.self_attn(x, batch))
        x, residual = self.pre_feedforward_layernorm(x, residual)
        y = self.mlp(x)
        if self.experts is not None:
            weights, ids = self.router(residual)
            chosen = self.experts(self.pre_feedforward_layernorm_2(residual), weights, ids)
            y = self.post_feedforward_layernorm_1(y) + self.post_feedforward_layernorm_2(chosen)
        x = residual + self.post_feedforward_layernorm(y)
        if inputs is not None:
            gate = self.act_fn(self.per_layer_input_gate(x))
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gate * self.own_input(inputs)))
        scaled: torch.Tensor = self.layer_scalar(x)
        return scaled


class Gemma4ForCausalLM(DecoderLM):
    """Gemma 4, text only."""

    block: ClassVar[type[nn.Module]] = Gemma4Block
    config_class: ClassVar[type[DecoderConfig]] = Gemma4Config
    config_defaults: ClassVar[dict[str, Any]] = {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
    }
    config: Gemma4Config

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        c = self.config
        prefix = self.renames.get("model", "model")
        self.ignore_beginnings = (
            *type(self).ignore_beginnings,
            *(
                f"{prefix}.layers.{layer}.self_attn.{name}."
                for layer in range(c.num_hidden_layers)
                for name in ("k_proj", "v_proj", "k_norm")
                if c.is_shared(layer)
            ),
        )
        blocks: Any = self.model.layers
        for layer, owner in enumerate(c.owners):
            if layer != owner:
                blocks[layer].self_attn.attn.share(blocks[owner].self_attn.attn)
        if c.hidden_size_per_layer_input is not None:
            add_layer_inputs(self.model, c, c.hidden_size_per_layer_input, c.vocab_size_per_layer_input)

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """See `with_layers`."""
        return super().read_config(with_layers({**cls.config_defaults, **raw}))

    def embed_scale(self, config: DecoderConfig) -> float:
        """Embeddings are multiplied by the root of the hidden size."""
        return float(config.hidden_size**0.5)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See `DecoderLM`."""
        trunk: Any = self.model
        x, inputs = trunk.embed_tokens(batch.token_ids), None
        if self.config.hidden_size_per_layer_input is not None:
            inputs = layer_inputs(trunk, x, batch.token_ids)
        for block in trunk.layers:
            x = block(x, batch, inputs)
        hidden: torch.Tensor = trunk.norm(x, None)[0]
        return hidden


class Gemma4ForConditionalGeneration(Gemma4ForCausalLM):
    """Gemma 4 with what sees and hears: the text model; neither images nor sound are read."""

    renames: ClassVar[dict[str, str]] = {"model": "model.language_model"}
    ignore_beginnings = EYES
    notes = TEXT_ONLY

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """The text model's fields stand in an object of their own."""
        return super().read_config(text_fields(raw))
