"""Gemma 3n's MLP with a sparse gate, its residual of low rank, and what keeps its streams together."""

from __future__ import annotations

from statistics import NormalDist

import torch
from torch import nn

from samovar.layers import Activation, ColumnLinear, Layer, Linear, Placement, RMSNorm, RowLinear, Source
from samovar.layers.altup import Correct, Predict, SmallProduct, StreamOf
from samovar.models.gemma3n_config import Gemma3nConfig


class SparseGate(Layer):
    """gelu(gate) * up, of which only gates far above their mean count: so many deviations that `part` of normally
    distributed ones would be zero. A row's gates may be split over devices."""

    is_row_wise = True

    def __init__(self, width: int, part: float, activation: str) -> None:
        super().__init__()
        self.width, self.deviations, self.activation = (
            width,
            NormalDist().inv_cdf(part),
            Activation(activation).function,
        )

    def bind(self, place: Placement) -> None:
        """Who else has gates of the same rows."""
        self.tp = place.tp

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [tokens, 2 * width of this rank], gate then up -> [tokens, width of this rank]."""
        gate, up = gate_up.chunk(2, dim=-1)
        mean = self._mean(gate)
        deviation = self._mean((gate - mean).square()).sqrt()
        return self.activation(torch.relu(gate - (mean + deviation * self.deviations))) * up

    def _mean(self, x: torch.Tensor) -> torch.Tensor:
        """Over all devices' columns, [tokens, 1]."""
        total = x.sum(-1, keepdim=True)
        return (total if self.tp.size == 1 else self.tp.all_reduce(total)) / self.width


class SparseGatedMLP(nn.Module):
    """`GatedMLP` with a sparse gate."""

    def __init__(self, dim: int, hidden: int, part: float, activation: str) -> None:
        super().__init__()
        self.gate_up_proj = ColumnLinear(dim, {"gate_proj": hidden, "up_proj": hidden})
        self.activation = SparseGate(hidden, part, activation)
        self.down_proj = RowLinear(hidden, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, dim] -> [tokens, dim]."""
        y: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
        return y


class Laurel(nn.Module):
    """x plus a normed product of low rank (Menghani et al., 2024)."""

    def __init__(self, c: Gemma3nConfig) -> None:
        super().__init__()
        self.linear_left = Linear(c.hidden_size, c.laurel_rank)
        self.linear_right = Linear(c.laurel_rank, c.hidden_size)
        self.post_laurel_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> the same shape."""
        y: torch.Tensor = x + self.post_laurel_norm(self.linear_right(self.linear_left(x)))
        return y


class ColumnScale(Layer):
    """Every column times a learned number, stored as `correct_output_scale` beside the layer."""

    is_row_wise = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim

    def bind(self, place: Placement) -> None:
        """Allocate the numbers."""
        self.weight = place.empty(self.dim)

    def sources(self) -> list[Source]:
        """The numbers, under the layer's own name."""
        return [Source(self.stored(self.path), self.weight)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, dim] -> the same shape."""
        return x * self.weight


class AltUp(nn.Module):
    """Predicts all streams from each other, and corrects them."""

    def __init__(self, c: Gemma3nConfig) -> None:
        super().__init__()
        count, active = c.altup_num_inputs, int(c.altup_active_idx)
        self.router_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.modality_router = SmallProduct(c.hidden_size, count)
        self.prediction_coefs = SmallProduct(count, count * count)
        self.correction_coefs = SmallProduct(count, count)
        self.tanh, self.scale = Activation("tanh"), 1 / c.hidden_size
        self.active, self.predict_by, self.correct_by = StreamOf(active), Predict(), Correct(active)
        self.correct_output_scale = ColumnScale(c.hidden_size) if c.altup_correct_scale else None

    def mixing(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> one number from -1 to 1 for each stream, [tokens, streams]."""
        y: torch.Tensor = self.tanh(self.modality_router(self.router_norm(x) * self.scale))
        return y

    def predict(self, streams: torch.Tensor) -> torch.Tensor:
        """streams [tokens, streams, hidden] -> the same shape."""
        y: torch.Tensor = self.predict_by(streams, self.prediction_coefs(self.mixing(self.active(streams))))
        return y

    def correct(self, predicted: torch.Tensor, activated: torch.Tensor) -> torch.Tensor:
        """predicted [tokens, streams, hidden], activated [tokens, hidden] -> streams."""
        y: torch.Tensor = self.correct_by(predicted, activated, self.correction_coefs(self.mixing(activated)))
        return y
