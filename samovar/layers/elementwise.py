"""Layers that change every number, or every row, by itself: activations, learned scalars, gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import gelu, relu, silu, softplus

from samovar.errors import CheckpointError
from samovar.layers.batch import ForwardBatch
from samovar.layers.layer import Layer, Placement, Source


def _relu_squared(x: torch.Tensor) -> torch.Tensor:
    return relu(x).square()


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return gelu(x, approximate="tanh")


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "relu": relu,
    "relu2": _relu_squared,
    "sigmoid": torch.sigmoid,
    "silu": silu,
    "softplus": softplus,
    "swish": silu,
    "tanh": torch.tanh,
}
"""Names of config.json -> what they do to each number."""


class Activation(Layer):
    """One of `FUNCTIONS`, by config.json's name; an unknown one raises `CheckpointError`."""

    is_row_wise = True

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in FUNCTIONS:
            raise CheckpointError(
                f"the activation {name!r} (hidden_act in config.json) is not supported here; "
                f"there are {', '.join(sorted(FUNCTIONS))}"
            )
        self.function = FUNCTIONS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape -> the same shape."""
        return self.function(x)


class ExpandedIntegral(Layer):
    """xIELU (Huang and Schlag, 2024): two learned slopes, for numbers above and below zero, kept positive by softplus."""

    is_row_wise = True
    LEAST = -1e-6
    """Below zero no number nearer than this is put through the exponential; published beside the slopes."""

    def bind(self, place: Placement) -> None:
        """Allocate the learned numbers."""
        self.alpha_p, self.alpha_n, self.beta = place.empty(1), place.empty(1), place.empty()

    def sources(self) -> list[Source]:
        """The two slopes, and the slope at zero."""
        named = {"alpha_p": self.alpha_p, "alpha_n": self.alpha_n, "beta": self.beta}
        return [Source(self.stored(f"{self.path}.{name}"), tensor) for name, tensor in named.items()]

    def unread(self) -> set[str]:
        """`LEAST`, which checkpoints have, too."""
        return {self.stored(f"{self.path}.eps")}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape -> the same shape."""
        up, down = softplus(self.alpha_p), self.beta + softplus(self.alpha_n)
        below = (torch.expm1(x.clamp(max=self.LEAST)) - x) * down
        return torch.where(x > 0, up * x * x, below) + self.beta * x


class Clip(Layer):
    """Numbers bounded by `limit` on both sides."""

    is_row_wise = True

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit = limit

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x of any shape -> the same shape."""
        return x.clamp(-self.limit, self.limit)


class Scalar(Layer):
    """x times one learned number, which the checkpoint has under the layer's own name."""

    is_row_wise = True

    def bind(self, place: Placement) -> None:
        """Allocate the number."""
        self.weight = place.empty(1)

    def sources(self) -> list[Source]:
        """The number."""
        return [Source(self.stored(self.path), self.weight)]

    def dummy(self, source: Source) -> torch.Tensor | None:
        """One."""
        return torch.ones_like(source.target)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, dim] -> the same shape."""
        return x * self.weight


class Columns(Layer):
    """Some columns of every row: `width` of them, from `first` on."""

    is_row_wise = True

    def __init__(self, first: int, width: int) -> None:
        super().__init__()
        self.first, self.width = first, width

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, dim] -> [tokens, width], a view."""
        return x[:, self.first : self.first + self.width]


class PositionScale(Layer):
    """Queries that grow with the logarithm of their position, so that attention to long texts stays sharp: the
    temperature of Llama 4. Row i is multiplied by 1 + strength * log(1 + floor((position + shift) / length))."""

    is_row_wise = True

    def __init__(self, strength: float, length: float, shift: int = 0) -> None:
        super().__init__()
        self.strength, self.length, self.shift = strength, length, shift

    def forward(self, q: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """q [tokens, heads, head_dim] -> the same shape."""
        key = (self.strength, self.length, self.shift)
        table = batch.rope_tables.get(key)
        if table is None:
            steps = torch.floor((batch.positions.float() + self.shift) / self.length)
            scale = (1 + self.strength * torch.log1p(steps)).to(q.dtype)[:, None, None]
            table = batch.rope_tables[key] = scale, scale
        return q * table[0]
