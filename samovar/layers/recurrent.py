"""Recurrent: a layer that remembers a sequence in a state of fixed size, in place of keys and values of every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from samovar.core.cache_spec import StateSpec
from samovar.layers.layer import Layer


class Recurrent(Layer):
    """A layer with a state for each sequence. `forward` is given the batch and finds in `batch.sequences` which rows of
    `state` are whose: it reads a row as what the sequence begins with, and writes what it ends with in its place."""

    state: tuple[torch.Tensor, ...] = ()
    """One tensor for each of the spec's, [rows, *shape]; given by `attach_state`."""

    def state_spec(self) -> StateSpec:
        """What the layer remembers of one sequence on this rank. After `bind`."""
        raise NotImplementedError(f"{type(self).__name__} does not say what its state is")

    def attach_state(self, tensors: Sequence[torch.Tensor]) -> None:
        """Give the layer its state. Called once, after the memory plan; they stay in place."""
        self.state = tuple(tensors)


def recurrent_layers(model: nn.Module) -> list[Recurrent]:
    """Every recurrent layer, in the order in which the model declares them."""
    return [layer for layer in model.modules() if isinstance(layer, Recurrent)]


def attach_states(model: nn.Module, states: Sequence[Sequence[torch.Tensor]]) -> None:
    """Give every recurrent layer of a bound model its state, in order."""
    for layer, tensors in zip(recurrent_layers(model), states, strict=True):
        layer.attach_state(tensors)
