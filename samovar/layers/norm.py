"""RMS norms: plain, joined with the residual add, and over a width that is split between devices."""

from __future__ import annotations

import torch

from samovar.kernels.add_rms_norm import add_rms_norm
from samovar.kernels.rms_norm import rms_norm
from samovar.layers.layer import Layer, Placement, Source


class RMSNorm(Layer):
    """norm(x) over the last axis of size `dim`.

    With `offset` the stored weight is the difference from one, as Gemma keeps it; one is added in float32 after
    loading.
    """

    def __init__(self, dim: int, eps: float, *, offset: bool = False) -> None:
        super().__init__()
        self.dim, self.eps, self.offset = dim, eps, offset

    def bind(self, place: Placement) -> None:
        """Allocate the weight [dim], in float32 if one will be added to it: small differences survive."""
        self.weight = place.empty(self.dim, dtype=torch.float32 if self.offset else None)
        self.norm = place.kernels.use(rms_norm)

    def sources(self) -> list[Source]:
        """The weight."""
        return [Source(self.stored(f"{self.path}.weight"), self.weight)]

    def after_load(self) -> None:
        """Add one to an offset weight, once."""
        if self.offset:
            self.weight += 1.0

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> the same shape: the norm alone, in subclasses too."""
        return self.norm(x, self.weight, self.eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> the same shape."""
        return self.normed(x)


class UnitRMSNorm(Layer):
    """The norm alone, without a weight: the checkpoint has nothing for it."""

    is_row_wise = True

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps

    def bind(self, place: Placement) -> None:
        """The op wants a weight: ones."""
        self.ones = torch.ones(self.dim, dtype=place.dtype, device=place.device)
        self.norm = place.kernels.use(rms_norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., dim] -> the same shape."""
        return self.norm(x, self.ones, self.eps)


class AddRMSNorm(RMSNorm):
    """x, residual = norm(x, residual): adds first, then norms the sum; the sum is the new residual."""

    def bind(self, place: Placement) -> None:
        """Allocate the weight [dim]."""
        super().bind(place)
        self.add_norm = place.kernels.use(add_rms_norm)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """(norm(x + residual), x + residual); before the first block `residual` is None and counts as zero."""
        if residual is None:
            return self.norm(x, self.weight, self.eps), x
        return self.add_norm(x, residual, self.weight, self.eps)


class HeadsRMSNorm(RMSNorm):
    """One norm over all heads of a token together, for x [tokens, heads, head_dim]; heads may be split over devices."""

    def __init__(self, heads: int, head_dim: int, eps: float) -> None:
        super().__init__(heads * head_dim, eps)
        self.heads, self.head_dim = heads, head_dim

    def bind(self, place: Placement) -> None:
        """Allocate the weight of this rank's heads."""
        self.tp = place.tp
        self.shard = head_shard(self.heads, place)
        self.local = self.heads // self.shard[1] * self.head_dim
        self.weight = place.empty(self.local)
        self.norm = place.kernels.use(rms_norm)

    def sources(self) -> list[Source]:
        """This rank's slice of the weight."""
        return [Source(self.stored(f"{self.path}.weight"), self.weight, axis=0, shard=self.shard)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, heads, head_dim] of this rank -> the same shape."""
        flat = x.flatten(1)
        if self.tp.size == 1:
            return self.norm(flat, self.weight, self.eps).view_as(x)
        flat = flat.float()
        copies = self.tp.size // self.shard[1]  # ranks that hold the same heads: their squares are counted once
        squares = self.tp.all_reduce(flat.square().sum(-1, keepdim=True)) / copies
        return (flat * torch.rsqrt(squares / self.dim + self.eps) * self.weight.float()).to(x.dtype).view_as(x)


def head_shard(heads: int, place: Placement) -> tuple[int, int]:
    """(which, of how many) parts of `heads` this rank holds; heads are copied when there are more ranks than heads."""
    if heads >= place.tp.size:
        place.tp.share(heads, "the number of attention heads")
        return place.tp.rank, place.tp.size
    copies = place.tp.size // heads
    if heads * copies != place.tp.size:
        place.tp.share(heads, "the number of key/value heads")
    return place.tp.rank // copies, heads
