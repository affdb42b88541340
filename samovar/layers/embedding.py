"""Token embedding and output head, split over the vocabulary. Each composes a weight format; none knows one."""

from __future__ import annotations

import torch

from samovar.layers.layer import Layer, Placement, Source


class Table(Layer):
    """A matrix with one row for each id of the vocabulary, of which this rank holds `rows`."""

    def __init__(self, vocab_size: int, dim: int) -> None:
        super().__init__()
        self.vocab_size, self.dim = vocab_size, dim

    def hold(self, place: Placement) -> None:
        """Allocate this rank's rows."""
        self.tp, self.rows = place.tp, place.tp.share(self.vocab_size, "the vocabulary size")
        self.compute_dtype = place.dtype
        self.quant = place.table(self.path).of_parts([self.stored(f"{self.path}.weight")])
        self.weights = self.quant.allocate(
            self.quant.tensors, {"out": self.rows, "in": self.dim, "part": 1}, [self.rows], place.empty
        )

    @property
    def weight(self) -> torch.Tensor:
        """The rows, as a plain format holds them."""
        return self.weights["weight"]

    def sources(self) -> list[Source]:
        """Everything that the format stores; the plain weight is [vocabulary, dim] in the checkpoint."""
        copies = []
        for spec in self.quant.tensors:
            axis = spec.index_of("out") if self.tp.size > 1 else None
            target = self.quant.part_of(self.weights, spec, 0, 0, self.rows)
            shard = (0, 1) if axis is None else (self.tp.rank, self.tp.size)
            copies.append(Source(self.stored(f"{self.path}.{spec.name}"), target, axis, shard))
        return copies

    def dummy(self, source: Source) -> torch.Tensor | None:
        """See `Layer`."""
        return self.quant.dummy(source.name.rpartition(".")[2], source.target)

    def resident_bytes(self) -> int:
        """See `Layer`."""
        return self.quant.resident_bytes(self.weights, [self.rows])

    def after_load(self) -> None:
        """Let the format repack its tensors."""
        self.weights = self.quant.after_load(self.weights, [self.rows])


class Embedding(Table):
    """Token ids -> vectors, multiplied by `scale` (rounded to the model's dtype first, as checkpoints expect)."""

    def __init__(self, vocab_size: int, dim: int, *, scale: float | None = None) -> None:
        super().__init__(vocab_size, dim)
        self.scale = scale

    def bind(self, place: Placement) -> None:
        """Allocate this rank's rows."""
        self.hold(place)
        self.first = self.tp.rank * self.rows
        self.factor = None if self.scale is None else float(torch.tensor(self.scale, dtype=place.dtype))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids [tokens] -> [tokens, dim]."""
        if self.tp.size == 1:
            x = self.quant.look_up(token_ids, self.weights)
        else:
            local = token_ids - self.first
            mine = (local >= 0) & (local < self.rows)
            x = self.quant.look_up(local.where(mine, 0), self.weights) * mine.unsqueeze(-1)
            x = self.tp.all_reduce(x)
        return x if self.factor is None else x * self.factor


class LMHead(Table):
    """Hidden states -> logits over the whole vocabulary; with `tied_to`, through the embedding's own tensor."""

    def __init__(self, vocab_size: int, dim: int, *, tied_to: Embedding | None = None, bias: bool = False) -> None:
        super().__init__(vocab_size, dim)
        self.tied = (tied_to,)  # a tuple, so that the embedding does not become a child of the head
        self.has_bias, self.head_bias = bias, torch.empty(0)

    def bind(self, place: Placement) -> None:
        """Allocate this rank's rows, unless they are the embedding's."""
        self.tp = place.tp
        if self.tied[0] is None:
            self.hold(place)
        if self.has_bias:
            self.head_bias = place.empty(place.tp.share(self.vocab_size, "the vocabulary size"))

    @property
    def table(self) -> Table:
        """Whose matrix it is."""
        return self.tied[0] or self

    @property
    def weight(self) -> torch.Tensor:
        """The rows, as a plain format holds them."""
        return self.table.weights["weight"]

    def sources(self) -> list[Source]:
        """The weight, unless it is the embedding's; and the bias, if there is one."""
        found = super().sources() if self.tied[0] is None else []
        if self.has_bias:
            split = (0, (self.tp.rank, self.tp.size)) if self.tp.size > 1 else (None, (0, 1))
            found.append(Source(self.stored(f"{self.path}.bias"), self.head_bias, *split))
        return found

    def unread(self) -> set[str]:
        """A tied checkpoint may hold the tensor a second time."""
        return self.zeros() if self.tied[0] is None else {self.stored(f"{self.path}.weight")}

    def zeros(self) -> set[str]:
        """See `Linear`: a quantized head may have a bias that says nothing."""
        is_own = self.tied[0] is None and not self.has_bias and self.quant.may_store_zero_bias
        return {self.stored(f"{self.path}.bias")} if is_own else set()

    def resident_bytes(self) -> int:
        """See `Layer`."""
        return (super().resident_bytes() if self.tied[0] is None else 0) + self.head_bias.nbytes

    def after_load(self) -> None:
        """Let the format repack what is not the embedding's."""
        if self.tied[0] is None:
            super().after_load()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, dim] -> float32 [rows, vocabulary]."""
        table = self.table
        logits = table.quant.logits(x, table.weights)
        return self.tp.all_gather(logits + self.head_bias if self.has_bias else logits)
