"""Several streams instead of one (AltUp, Baykal et al., 2023): streams are [tokens, streams, hidden]."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from samovar.layers.layer import Layer, Placement, Source


class SmallProduct(Layer):
    """y = x W^T of a few features: never quantized, never split."""

    is_row_wise = True

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features

    def bind(self, place: Placement) -> None:
        """Allocate."""
        self.weight = place.empty(self.out_features, self.in_features)

    def sources(self) -> list[Source]:
        """The weight."""
        return [Source(self.stored(f"{self.path}.weight"), self.weight)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] -> [tokens, out]."""
        return linear(x, self.weight)


class Streams(Layer):
    """Rows side by side, as streams."""

    is_row_wise = True

    def forward(self, *rows: torch.Tensor) -> torch.Tensor:
        """Each [tokens, hidden] -> [tokens, streams, hidden]."""
        return torch.stack(rows, dim=1)


class StreamOf(Layer):
    """One of the streams."""

    is_row_wise = True

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """[tokens, streams, hidden] -> [tokens, hidden]."""
        return streams[:, self.index]


class Predict(Layer):
    """Streams plus a mixture of them all."""

    is_row_wise = True

    def forward(self, streams: torch.Tensor, mixture: torch.Tensor) -> torch.Tensor:
        """streams [tokens, n, hidden], mixture [tokens, n * n], for each stream what it takes of each -> streams."""
        n = streams.shape[1]
        return torch.baddbmm(streams, mixture.view(-1, n, n), streams)


class Correct(Layer):
    """Every predicted stream moved by what the computed one differs from its prediction, each by a factor of its own."""

    is_row_wise = True

    def __init__(self, active: int) -> None:
        super().__init__()
        self.active = active

    def forward(self, predicted: torch.Tensor, computed: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        """predicted [tokens, n, hidden], computed [tokens, hidden], factors less one [tokens, n] -> streams."""
        news = computed - predicted[:, self.active]
        return predicted + news[:, None] * (factors + 1)[:, :, None]


class Others(Layer):
    """Adds to all streams but the first."""

    is_row_wise = True

    def forward(self, streams: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """streams [tokens, n, hidden], x [tokens, hidden] -> streams."""
        return torch.cat((streams[:, :1], streams[:, 1:] + x[:, None]), dim=1)


class MatchedSize(Layer):
    """Rows made as large, in the mean of their squares, as others."""

    is_row_wise = True
    LEAST = 1e-5
    """Squares that are divided by are at least this."""

    def forward(self, x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """x, like [tokens, hidden] -> x, scaled."""
        size = like.square().mean(-1, keepdim=True).sqrt()
        return x * size / x.square().mean(-1, keepdim=True).clamp(min=self.LEAST).sqrt()


class MeanOfStreams(Layer):
    """The mean of rows."""

    is_row_wise = True

    def forward(self, *rows: torch.Tensor) -> torch.Tensor:
        """Each [tokens, hidden] -> [tokens, hidden]."""
        return torch.stack(rows).mean(0)
