"""Gemma 3n: the text model, alone or beside what sees and hears. Read beside transformers/models/gemma3n.

Four streams instead of one: alternating updates (Baykal et al., 2023) predict all of them from each other, compute one
with the block, and correct the others by what that one turned out to be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.layers import Activation, Columns, ForwardBatch, GatedMLP, Linear, RMSNorm
from samovar.layers.altup import MatchedSize, MeanOfStreams, Others, StreamOf, Streams
from samovar.models.config import DecoderConfig
from samovar.models.decoder import EYES, TEXT_ONLY
from samovar.models.fields import text_fields
from samovar.models.gemma3n_config import Gemma3nConfig, with_streams
from samovar.models.gemma3n_parts import AltUp, Laurel, SparseGatedMLP
from samovar.models.gemma4 import Gemma4ForCausalLM
from samovar.models.gemma4_attention import Gemma4Attention, Gemma4SharedAttention
from samovar.models.gemma4_parts import layer_inputs


class Gemma3nBlock(nn.Module):
    """One stream passes attention, Laurel and MLP; all are corrected, and all but the first get what is added."""

    def __init__(self, c: Gemma3nConfig, layer: int) -> None:
        super().__init__()
        hidden, eps, part = c.hidden_size, c.rms_norm_eps, c.sparsity[layer]
        self.self_attn = (Gemma4SharedAttention if c.is_shared(layer) else Gemma4Attention)(c, layer)
        self.mlp: nn.Module = GatedMLP(hidden, c.widths[layer], c.hidden_act)
        if part > 0:
            self.mlp = SparseGatedMLP(hidden, c.widths[layer], part, c.hidden_act)
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        self.pre_feedforward_layernorm = RMSNorm(hidden, eps)
        self.post_feedforward_layernorm = RMSNorm(hidden, eps)
        self.altup, self.laurel = AltUp(c), Laurel(c)
        width = c.hidden_size_per_layer_input or 0
        self.own_input, self.act_fn, self.others = Columns(layer * width, width), Activation(c.hidden_act), Others()
        self.per_layer_input_gate = Linear(hidden, width)
        self.per_layer_projection = Linear(width, hidden)
        self.post_per_layer_input_norm = RMSNorm(hidden, eps)

    def forward(self, streams: torch.Tensor, batch: ForwardBatch, inputs: torch.Tensor) -> torch.Tensor:
        """streams [tokens, streams, hidden] and what is added to all layers [tokens, layers * width] -> streams."""
        predicted = self.altup.predict(streams)
        active = self.altup.active(predicted)
        normed = self.input_layernorm(active)
        attended = active + self.post_attention_layernorm(self.self_attn(normed, batch))
        x = (attended + self.laurel(normed)) * 2.0**-0.5
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        corrected = self.altup.correct(predicted, x)
        first = self.altup.active(corrected)
        if self.altup.correct_output_scale is not None:
            first = self.altup.correct_output_scale(first)
        gated = self.act_fn(self.per_layer_input_gate(first)) * self.own_input(inputs)
        y: torch.Tensor = self.others(corrected, self.post_per_layer_input_norm(self.per_layer_projection(gated)))
        return y


class Gemma3nForCausalLM(Gemma4ForCausalLM):
    """Gemma 3n, text only."""

    block = Gemma3nBlock
    config_class = Gemma3nConfig
    config_defaults: ClassVar[dict[str, Any]] = {
        "tie_word_embeddings": True,
        "hidden_activation": "gelu_pytorch_tanh",
        "head_dim": 256,
        "sliding_window": 512,
        "hidden_size_per_layer_input": 256,
        "vocab_size_per_layer_input": 262_144,
        "num_kv_shared_layers": 15,
        "final_logit_softcapping": 30.0,
        "intermediate_size": 16_384,
    }
    config: Gemma3nConfig

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        hidden, others = config.hidden_size, range(1, self.config.altup_num_inputs)
        self.model.altup_projections = nn.ModuleList(Linear(hidden, hidden) for _ in others)
        self.model.altup_unembed_projections = nn.ModuleList(Linear(hidden, hidden) for _ in others)
        self.matched, self.streams, self.mean = MatchedSize(), Streams(), MeanOfStreams()
        self.stream_of = nn.ModuleList(StreamOf(i) for i in range(len(others) + 1))

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """See `with_streams`."""
        return super().read_config(with_streams({**cls.config_defaults, **raw}))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """See `DecoderLM`."""
        trunk: Any = self.model
        x = trunk.embed_tokens(batch.token_ids)
        known = batch.token_ids * (batch.token_ids < trunk.embed_tokens_per_layer.vocab_size)
        inputs = layer_inputs(trunk, x, known)
        streams = self.streams(x, *(self.matched(product(x), x) for product in trunk.altup_projections))
        for block in trunk.layers:
            streams = block(streams, batch, inputs)
        first, *others = (stream_of(streams) for stream_of in self.stream_of)
        products = zip(trunk.altup_unembed_projections, others, strict=True)
        x = self.mean(first, *(self.matched(product(other), first) for product, other in products))
        hidden: torch.Tensor = trunk.norm(x, None)[0]
        return hidden


class Gemma3nForConditionalGeneration(Gemma3nForCausalLM):
    """Gemma 3n with what sees and hears: the text model; neither images nor sound are read."""

    renames: ClassVar[dict[str, str]] = {"model": "model.language_model"}
    ignore_beginnings = EYES
    notes = TEXT_ONLY

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """The text model's fields stand in an object of their own."""
        return super().read_config(text_fields(raw))
