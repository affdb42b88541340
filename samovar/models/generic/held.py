"""Tensors that stay where Transformers has them, loaded as ours are."""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from samovar.layers import Layer, Placement, Source
from samovar.models.generic.names import Stored, view_of
from samovar.models.generic.naming import Naming

HELD = "samovar_tensors"
"""Name of our layer inside of a module of Transformers that keeps tensors."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tensor:
    """A parameter or buffer that stays where Transformers has it: `owners` are (module, attribute), tied ones included."""

    owners: tuple[tuple[nn.Module, str], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype | None
    """None: the model's."""
    pieces: tuple[Stored, ...]
    copies: frozenset[str]
    """Second names of tied tensors."""


class Held(Layer):
    """The tensors that a module of Transformers keeps, loaded as ours are."""

    naming: Naming

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.tensors = tuple(tensors)
        self.weights: dict[str, torch.Tensor] = {}

    def bind(self, place: Placement) -> None:
        """Allocate, and put the tensors where the module looks for them."""
        self.weights = {}
        for tensor in self.tensors:
            made = place.empty(*tensor.shape, dtype=tensor.dtype)
            for module, name in tensor.owners:
                if name in module._parameters:
                    module._parameters[name] = nn.Parameter(made, requires_grad=False)
                else:
                    module._buffers[name] = made
            self.weights[tensor.owners[0][1]] = made

    def sources(self) -> list[Source]:
        """One copy for each piece of each tensor."""
        return [
            Source(self.naming.of(piece.name), view_of(piece, self.weights[tensor.owners[0][1]]))
            for tensor in self.tensors
            for piece in tensor.pieces
        ]

    def unread(self) -> set[str]:
        """Second copies of tied tensors."""
        return {self.naming.of(name) for tensor in self.tensors for name in tensor.copies}

    def dummy(self, source: Source) -> torch.Tensor | None:
        """Vectors called weight are those of norms: neutral."""
        is_norm = source.target.dim() == 1 and source.name.endswith(".weight")
        return torch.ones_like(source.target) if is_norm else None


def _loaded_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers of a module itself that a checkpoint holds."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def hold(causal: Any, pieces: Mapping[str, list[Stored]]) -> None:
    """Give every module that still has tensors a layer that loads them; tied ones have one owner."""
    users: dict[torch.Tensor, list[tuple[nn.Module, str, str]]] = defaultdict(list)
    for path, module in causal.named_modules():
        for name, tensor in _loaded_tensors(module):
            users[tensor].append((module, name, ".".join(filter(None, (path, name)))))
    strict = [re.compile(pattern) for pattern in causal._keep_in_fp32_modules_strict or ()]
    by_owner: dict[nn.Module, list[Tensor]] = defaultdict(list)
    for tensor, places in users.items():
        places.sort(key=lambda place: place[2] in causal.all_tied_weights_keys)
        owners, key = tuple((module, name) for module, name, _ in places), places[0][2]
        dtype = torch.float32 if any(pattern.search(key) for pattern in strict) else None
        if not tensor.is_floating_point():
            dtype = tensor.dtype
        copies = frozenset(piece.name for _, _, other in places[1:] for piece in pieces[other])
        by_owner[owners[0][0]].append(Tensor(owners, tuple(tensor.shape), dtype, tuple(pieces[key]), copies))
    for module, tensors in by_owner.items():
        module.add_module(HELD, Held(tensors))
