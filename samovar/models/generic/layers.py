"""Our layers in the places of Transformers' modules: any leading axes, and names that are those of the checkpoint."""

from __future__ import annotations

import dataclasses

import torch

from samovar.layers import Embedding, Linear, LMHead, Placement, Source
from samovar.models.generic.naming import Naming

TURNED = {None: None, 0: 1, 1: 0}
"""Axes of a matrix whose transpose is stored."""


class GenericLinear(Linear):
    """`nn.Linear`, or with `transposed` the Conv1D of Transformers. `parts` maps the checkpoint's prefixes to outputs."""

    naming: Naming

    def __init__(
        self,
        in_features: int,
        out_features: int,
        parts: dict[str, int],
        *,
        bias: bool = False,
        transposed: bool = False,
    ) -> None:
        super().__init__(in_features, parts, bias=bias)
        self.out_features, self.transposed = out_features, transposed
        self.is_bound = False

    def bind(self, place: Placement) -> None:
        """Allocate."""
        self.is_bound = True
        super().bind(place)

    def _prefixes(self) -> list[str]:
        return list(self.parts)

    def stored(self, name: str) -> str:
        """See `Layer`."""
        return self.naming.of(name)

    @property
    def weight(self) -> torch.Tensor:
        """[out, in], of a plain format: some modules ask for its type."""
        if not self.is_bound:
            return torch.empty(self.out_features, self.in_features, device="meta")
        return self.weights["weight"]

    def sources(self) -> list[Source]:
        """See `Linear`."""
        found = super().sources()
        if not self.transposed:
            return found
        return [
            dataclasses.replace(s, target=s.target.t(), axis=TURNED[s.axis]) if s.target.dim() == 2 else s
            for s in found
        ]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        if not self.is_bound:
            return x.new_empty(*x.shape[:-1], self.out_features)
        rows = x.reshape(-1, x.shape[-1]).to(self.compute_dtype)
        if self.split == "in" and self.tp.size > 1:
            y = self.tp.all_reduce(self.quant.multiply(rows, self.weights))
            y = y if self.bias is None else y + self.bias
        else:
            y = self.project(rows)
        return y.view(*x.shape[:-1], -1).to(x.dtype)


class GenericEmbedding(Embedding):
    """`nn.Embedding`."""

    is_bound = False
    naming: Naming
    checkpoint_name = ""

    def stored(self, name: str) -> str:
        """See `Layer`."""
        return self.naming.of(self.checkpoint_name + name.removeprefix(self.path))

    def bind(self, place: Placement) -> None:
        """Allocate."""
        self.is_bound = True
        super().bind(place)

    @property
    def weight(self) -> torch.Tensor:
        """[vocabulary, dim], of a plain format: some modules ask for its type."""
        return super().weight if self.is_bound else torch.empty(self.vocab_size, self.dim, device="meta")

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [...] -> [..., dim]."""
        if not self.is_bound:
            return torch.empty(*token_ids.shape, self.dim, device=token_ids.device)
        return super().forward(token_ids.reshape(-1)).view(*token_ids.shape, -1)


class GenericHead(LMHead):
    """The output head, an `nn.Linear` without a bias."""

    is_bound = False
    naming: Naming
    checkpoint_name = ""

    def bind(self, place: Placement) -> None:
        """Allocate, unless it shares the embedding's tensor."""
        self.is_bound = True
        super().bind(place)

    def stored(self, name: str) -> str:
        """See `Layer`."""
        return self.naming.of(self.checkpoint_name + name.removeprefix(self.path))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> float32 [..., vocabulary]."""
        if not self.is_bound:
            return x.new_empty(*x.shape[:-1], self.vocab_size)
        rows = x.reshape(-1, x.shape[-1]).to(self.table.compute_dtype)
        return super().forward(rows).view(*x.shape[:-1], -1)
