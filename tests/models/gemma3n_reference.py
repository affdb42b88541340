"""Gemma 3n as it is published, with what sees and hears beside the text model: that needs timm, and is left out here."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers import Gemma3nForCausalLM, Gemma3nTextConfig


class Gemma3nForConditionalGeneration(nn.Module):
    """The text model under the names of the whole, and one tensor of what is left unread."""

    config_class = Gemma3nTextConfig

    def __init__(self, config: Any) -> None:
        super().__init__()
        text = Gemma3nForCausalLM(config)
        self.model, self.lm_head, self.cap = nn.Module(), text.lm_head, config.final_logit_softcapping
        self.model.language_model = text.model
        self.model.vision_tower = nn.Linear(4, 4)

    def forward(self, ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        """ids [1, tokens] -> logits [1, tokens, vocab]."""
        trunk: Any = self.model.language_model
        logits = self.lm_head(trunk(ids, use_cache=use_cache).last_hidden_state)
        return SimpleNamespace(logits=torch.tanh(logits / self.cap) * self.cap)
