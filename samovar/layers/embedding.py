"""Token embedding and output head, split over the vocabulary."""

from __future__ import annotations

import torch
from torch.nn.functional import embedding

from samovar.kernels.logits import logits
from samovar.layers.layer import Layer, Placement, Source


class Embedding(Layer):
    """Token ids -> vectors, multiplied by `scale` (rounded to the model's dtype first, as checkpoints expect)."""

    def __init__(self, vocab_size: int, dim: int, *, scale: float | None = None) -> None:
        super().__init__()
        self.vocab_size, self.dim, self.scale = vocab_size, dim, scale

    def bind(self, place: Placement) -> None:
        """Allocate this rank's rows."""
        self.tp = place.tp
        self.weight = place.empty(place.tp.share(self.vocab_size, "the vocabulary size"), self.dim)
        self.first = self.tp.rank * len(self.weight)
        self.factor = None if self.scale is None else float(torch.tensor(self.scale, dtype=place.dtype))

    def sources(self) -> list[Source]:
        """The weight, [vocabulary, dim] in the checkpoint."""
        shard = (self.tp.rank, self.tp.size)
        return [
            Source(self.stored(f"{self.path}.weight"), self.weight, axis=0 if self.tp.size > 1 else None, shard=shard)
        ]

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [tokens] -> [tokens, dim]."""
        if self.tp.size == 1:
            x = embedding(token_ids, self.weight)
        else:
            local = token_ids - self.first
            mine = (local >= 0) & (local < len(self.weight))
            x = self.tp.all_reduce(self.weight[local.where(mine, 0)] * mine.unsqueeze(-1))
        return x if self.factor is None else x * self.factor


class LMHead(Layer):
    """Hidden states -> logits over the whole vocabulary; with `tied_to`, through the embedding's own tensor."""

    def __init__(self, vocab_size: int, dim: int, *, tied_to: Embedding | None = None) -> None:
        super().__init__()
        self.vocab_size, self.dim = vocab_size, dim
        self.tied = (tied_to,)  # a tuple, so that the embedding does not become a child of the head

    def bind(self, place: Placement) -> None:
        """Allocate this rank's rows, unless they are the embedding's."""
        self.tp, self.logits = place.tp, place.kernels.use(logits)
        (tied,) = self.tied
        rows = place.tp.share(self.vocab_size, "the vocabulary size")
        self.weight = place.empty(rows, self.dim) if tied is None else tied.weight

    def sources(self) -> list[Source]:
        """The weight, unless it is the embedding's."""
        if self.tied[0] is not None:
            return []
        shard = (self.tp.rank, self.tp.size)
        return [
            Source(self.stored(f"{self.path}.weight"), self.weight, axis=0 if self.tp.size > 1 else None, shard=shard)
        ]

    def unread(self) -> set[str]:
        """A tied checkpoint may hold the tensor a second time."""
        return set() if self.tied[0] is None else {self.stored(f"{self.path}.weight")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, dim] -> float32 [rows, vocabulary]."""
        return self.tp.all_gather(self.logits(x, self.weight))
