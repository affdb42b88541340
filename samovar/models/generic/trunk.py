"""A model taken apart: the body below the head, and the head alone."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from samovar.models.generic.masks import Unsupported


def take_trunk(causal: Any) -> tuple[str, nn.Module, nn.Module]:
    """The body below the head: its name, itself, and what of it runs. The head is left with a stand-in that hands through
    what it gets as embeddings."""
    from transformers import PreTrainedModel

    bodies = [(name, child) for name, child in causal.named_children() if isinstance(child, PreTrainedModel)]
    if len(bodies) != 1:
        raise Unsupported(f"it has {len(bodies)} models below its head")
    name, body = bodies[0]
    stand_in = HandThrough()
    if isinstance(decoder := getattr(body, "decoder", None), PreTrainedModel):  # some heads reach through the body
        stand_in.add_module("decoder", HandThrough())
    setattr(causal, name, stand_in)
    trunk = decoder if isinstance(decoder, PreTrainedModel) else body
    if "position_ids" not in inspect.signature(trunk.forward).parameters:
        raise Unsupported("it counts positions by itself")
    return name, body, trunk


class Handed:
    """What a trunk gives, with nothing but the last hidden state."""

    def __init__(self, last_hidden_state: torch.Tensor) -> None:
        self.last_hidden_state = last_hidden_state

    def __getattr__(self, name: str) -> None:
        """Everything else is absent."""
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]


class HandThrough(nn.Module):
    """In the place of a trunk: gives its input as the last hidden state, so that the head of a model runs alone."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **rest: Any) -> Handed:
        """inputs_embeds [1, rows, hidden] -> an output with them."""
        return Handed(inputs_embeds)
