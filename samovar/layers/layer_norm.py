"""Layer norms (Ba et al., 2016): mean and variance of each row, with or without weight and bias."""

from __future__ import annotations

import torch
from torch.nn.functional import layer_norm

from samovar.layers.layer import Layer, Placement, Source
from samovar.layers.norm import head_shard


class LayerNorm(Layer):
    """norm(x) over the last axis of size `dim`, computed in float32.

    With `offset` the stored weight is the difference from one, as Nemotron keeps it. With `has_weight` off there is
    neither weight nor bias, as in OLMo.
    """

    is_row_wise = True

    def __init__(
        self, dim: int, eps: float, *, bias: bool = True, offset: bool = False, has_weight: bool = True
    ) -> None:
        super().__init__()
        self.dim, self.eps, self.has_bias, self.offset, self.has_weight = dim, eps, bias, offset, has_weight
        self.weight: torch.Tensor | None = None
        self.bias: torch.Tensor | None = None

    def bind(self, place: Placement) -> None:
        """Allocate weight and bias [dim]."""
        if self.has_weight:
            self.weight = place.empty(self.dim)
            self.bias = place.empty(self.dim) if self.has_bias else None

    def sources(self) -> list[Source]:
        """What there is of weight and bias."""
        named = {"weight": self.weight, "bias": self.bias}
        return [
            Source(self.stored(f"{self.path}.{name}"), tensor) for name, tensor in named.items() if tensor is not None
        ]

    def dummy(self, source: Source) -> torch.Tensor | None:
        """A weight of one."""
        one = 0.0 if self.offset else 1.0
        return None if source.target is self.bias else torch.full_like(source.target, one)

    def after_load(self) -> None:
        """Add one to an offset weight, once, in float32 so that small differences survive."""
        if self.offset and self.weight is not None:
            self.weight = self.weight.float() + 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> the same shape."""
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return layer_norm(x.float(), (self.dim,), weight, bias, self.eps).to(x.dtype)


class AddLayerNorm(LayerNorm):
    """x, residual = norm(x, residual): adds first, then norms the sum; the sum is the new residual."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """(norm(x + residual), x + residual); before the first block `residual` is None and counts as zero."""
        total = x if residual is None else x + residual
        return super().forward(total), total


class HeadsLayerNorm(LayerNorm):
    """A norm of each head by itself whose weight differs from head to head; heads may be split over devices.

    `order` int64 [head_dim] is what features were brought into that the checkpoint has in another order. With
    `stored_apart` the checkpoint has the heads as modules of their own, `norms.0` and so on.
    """

    def __init__(
        self, heads: int, head_dim: int, eps: float, *, order: torch.Tensor | None = None, stored_apart: bool = False
    ) -> None:
        super().__init__(head_dim, eps, bias=False)
        self.heads, self.order, self.stored_apart = heads, order, stored_apart

    def bind(self, place: Placement) -> None:
        """Allocate the weight [heads, head_dim] of this rank's heads."""
        self.shard = head_shard(self.heads, place)
        self.weight = place.empty(self.heads // self.shard[1], self.dim)

    def sources(self) -> list[Source]:
        """This rank's heads of the weight."""
        assert self.weight is not None, "bound"
        if not self.stored_apart:
            return [Source(self.stored(f"{self.path}.weight"), self.weight, axis=0, shard=self.shard)]
        first = self.shard[0] * len(self.weight)
        return [Source(self._head(first + i), row) for i, row in enumerate(self.weight)]

    def _head(self, number: int) -> str:
        return self.stored(f"{self.path}.norms.{number}.weight")

    def claims(self) -> set[str]:
        """Of every head, wherever it is."""
        return {self._head(i) for i in range(self.heads)} if self.stored_apart else super().claims()

    def after_load(self) -> None:
        """Bring the weights into the order of the features."""
        if self.order is not None and self.weight is not None:
            self.weight.copy_(self.weight[:, self.order.to(self.weight.device)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, head_dim] of this rank -> the same shape."""
        assert self.weight is not None, "bound"
        return (layer_norm(x.float(), (self.dim,), eps=self.eps) * self.weight.float()).to(x.dtype)
