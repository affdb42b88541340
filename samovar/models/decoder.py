"""DecoderLM: the skeleton that every decoder-only family shares: embed, blocks, final norm, head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from samovar.attention.base import AttentionSpec
from samovar.core.cache_spec import CacheSpec, StateSpec
from samovar.layers import AddRMSNorm, Embedding, ForwardBatch, LMHead
from samovar.layers.attention import attention_layers
from samovar.layers.recurrent import recurrent_layers
from samovar.models.config import DecoderConfig

PARTS = ("vision_tower", "vision_model", "audio_tower", "multi_modal_projector", "embed_vision", "embed_audio")
EYES = tuple(f"{prefix}{part}." for part in PARTS for prefix in ("", "model."))
"""Beginnings of names of what sees and hears beside a text model."""
TEXT_ONLY = ("text only: the weights of what sees or hears are left unread",)


class DecoderLM(nn.Module):
    """A family subclasses this, names its block, and is done.

    A block is `Block(config, layer)` with `forward(x, residual, batch) -> (x, residual)`: x [tokens, hidden] is what the
    block before produced, residual [tokens, hidden] the stream that it has not been added to yet (None at first).
    """

    block: ClassVar[type[nn.Module]]
    config_class: ClassVar[type[DecoderConfig]] = DecoderConfig
    """Where the family's own fields of config.json are declared."""
    config_defaults: ClassVar[dict[str, Any]] = {}
    """Fields that this family's config.json files may leave out, with the value they mean."""
    renames: ClassVar[dict[str, str]] = {}
    """Our name -> the checkpoint's, for whole dotted parts of tensor names that differ."""
    other_renames: ClassVar[tuple[dict[str, str], ...]] = ()
    """What takes the place of `renames` for checkpoints that another tool wrote: the first whose embedding is there."""
    ignore: ClassVar[tuple[str, ...]] = (".rotary_emb.inv_freq",)
    """Endings of checkpoint names that nobody reads."""
    ignore_beginnings: tuple[str, ...] = ()
    """Beginnings of such names."""
    notes: tuple[str, ...] = ()
    """What a start should say of the model itself."""
    norm_offset: ClassVar[bool] = False
    """The final norm stores the difference of its weight from one."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Trunk(config, self)
        tied = self.model.embed_tokens if config.tie_word_embeddings else None
        self.lm_head = LMHead(config.vocab_size, config.hidden_size, tied_to=tied, bias=self.has_head_bias(config))

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> DecoderConfig:
        """config.json -> typed config. Families whose files need interpretation override this."""
        return cls.config_class.from_hf({**cls.config_defaults, **raw})

    def has_head_bias(self, config: DecoderConfig) -> bool:
        """Whether logits have a bias."""
        return False

    def embed_scale(self, config: DecoderConfig) -> float | None:
        """What embeddings are multiplied by; None for nothing."""
        return None

    def final_norm(self, config: DecoderConfig) -> nn.Module:
        """The norm behind the last block: called as an `AddRMSNorm` is."""
        return AddRMSNorm(config.hidden_size, config.rms_norm_eps, offset=self.norm_offset)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, hidden]."""
        x, residual = self.model.embed_tokens(batch.token_ids), None
        for block in self.model.layers:
            x, residual = block(x, residual, batch)
        hidden: torch.Tensor = self.model.norm(x, residual)[0]
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [rows, hidden] (after the final norm) -> float32 [rows, vocab]."""
        logits: torch.Tensor = self.lm_head(hidden).float()
        cap = self.config.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def attention_specs(self) -> list[AttentionSpec]:
        """What each attention layer needs from a backend on this rank. After `bind`."""
        return [layer.spec() for layer in attention_layers(self)]

    def cache_specs(self) -> list[CacheSpec]:
        """What each layer caches on this rank. After `bind`."""
        return [spec.cache for spec in self.attention_specs()]

    def state_specs(self) -> list[StateSpec]:
        """What each recurrent layer remembers of a sequence on this rank. After `bind`."""
        return [layer.state_spec() for layer in recurrent_layers(self)]


class Trunk(nn.Module):
    """Everything below the head; exists because checkpoints name it `model`."""

    def __init__(self, config: DecoderConfig, family: DecoderLM) -> None:
        super().__init__()
        scale = family.embed_scale(config)
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, scale=scale)
        self.layers = nn.ModuleList(family.block(config, i) for i in range(config.num_hidden_layers))
        self.norm = family.final_norm(config)
