"""Rotary position embedding with every published scaling. Tables are made once per step, not once per layer.

Scalings that depend on a length (dynamic NTK, LongRoPE) use the longest sequence that will be served, fixed when the
model is bound: keys already in the cache were rotated with the same frequencies as those to come, whatever else runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from samovar.errors import CheckpointError
from samovar.kernels.rope import rope
from samovar.kernels.rope_table import rope_table
from samovar.layers.batch import ForwardBatch
from samovar.layers.layer import Layer, Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeParameters:
    """The rope fields of config.json, under their names. Fields of other scalings stay at their defaults."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    partial_rotary_factor: float = 1.0
    max_position_embeddings: int = 0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    short_mscale: float | None = None
    long_mscale: float | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in SCALINGS:
            raise CheckpointError(
                f"the rope_type {self.rope_type!r} in config.json is not supported; there are "
                f"{', '.join(sorted(SCALINGS))}"
            )
        if not 0 < self.partial_rotary_factor <= 1:
            raise CheckpointError(
                f"partial_rotary_factor in config.json must be in (0, 1], got {self.partial_rotary_factor!r}"
            )
        for name in REQUIRED.get(self.rope_type, ()):
            if not getattr(self, name):
                raise CheckpointError(f"rope_type {self.rope_type!r} in config.json needs {name}, which is missing")

    def rotary_dim(self, head_dim: int) -> int:
        """How many features at the beginning of a head are turned."""
        return int(head_dim * self.partial_rotary_factor)

    def number(self, name: str) -> float:
        """A field that `REQUIRED` guarantees to be set."""
        return float(getattr(self, name))


REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor", "max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("short_factor", "long_factor", "original_max_position_embeddings"),
}
"""Fields without which a scaling has no meaning."""


class Rope(Layer):
    """Rotates queries and keys by their positions."""

    def __init__(self, head_dim: int, parameters: RopeParameters) -> None:
        super().__init__()
        self.head_dim, self.options = head_dim, parameters

    def bind(self, place: Placement) -> None:
        """Compute the frequencies; layers with equal ones share the tables of a step."""
        max_len = place.max_model_len or self.options.max_position_embeddings
        self.key = frequencies(self.head_dim, self.options, max_len)
        self.per_position = self.key.per_position.to(place.device)
        self.dtype, self.rope, self.rope_table = place.dtype, place.kernels.use(rope), place.kernels.use(rope_table)

    def forward(self, q: torch.Tensor, k: torch.Tensor, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k [tokens, heads, head_dim] -> rotated, same shapes."""
        return self.rope(q, k, *self.table(batch))

    def table(self, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """This step's cos, sin [tokens, 1, rotary_dim], as the op `rope` takes them."""
        table = batch.rope_tables.get(self.key)
        if table is None:
            table = self.rope_table(batch.positions, self.per_position, self.key.magnitude, self.dtype)
            batch.rope_tables[self.key] = table
        return table


@dataclass(frozen=True, slots=True, eq=False)
class Frequencies:
    """`per_position` [rotary_dim / 2] float32: radians per token; `magnitude` multiplies cos and sin.

    Equal parameters give the same object, which is the key of a step's tables.
    """

    per_position: torch.Tensor
    magnitude: float


@cache
def frequencies(head_dim: int, parameters: RopeParameters, max_len: int) -> Frequencies:
    """The frequencies for sequences of up to `max_len` tokens."""
    return Frequencies(*SCALINGS[parameters.rope_type](head_dim, parameters, max_len))


def _plain(dim: int, theta: float) -> torch.Tensor:
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def _rotary_dim(head_dim: int, p: RopeParameters) -> int:
    return p.rotary_dim(head_dim)


def _default(head_dim: int, p: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """No scaling."""
    return _plain(_rotary_dim(head_dim, p), p.rope_theta), 1.0


def _linear(head_dim: int, p: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """Position interpolation (Chen et al., 2023): all frequencies divided by `factor`."""
    return _plain(_rotary_dim(head_dim, p), p.rope_theta) / p.number("factor"), 1.0


def _dynamic(head_dim: int, p: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """NTK-aware scaling of the base, for lengths beyond the trained one; none below it."""
    dim, factor, trained = _rotary_dim(head_dim, p), p.number("factor"), p.max_position_embeddings
    stretch = factor * max(max_len, trained) / trained - (factor - 1)
    return _plain(dim, p.rope_theta * stretch ** (dim / (dim - 2))), 1.0


def _llama3(head_dim: int, p: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, a linear blend between."""
    plain = _plain(_rotary_dim(head_dim, p), p.rope_theta)
    factor, low, high = p.number("factor"), p.number("low_freq_factor"), p.number("high_freq_factor")
    turns = p.number("original_max_position_embeddings") / (2 * math.pi / plain)  # rotations over the trained length
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / factor + blend * plain, 1.0


def _yarn(head_dim: int, p: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): interpolation of slow dimensions, extrapolation of fast ones, a ramp between."""
    dim, theta, trained = _rotary_dim(head_dim, p), p.rope_theta, p.number("original_max_position_embeddings")
    factor = p.factor if p.factor is not None else p.max_position_embeddings / trained

    def dimension_at(rotations: float) -> float:
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension_at(p.beta_fast), dimension_at(p.beta_slow)
    if p.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low if high != low else 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / width).clamp(0, 1)
    plain = _plain(dim, theta)

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if p.attention_factor is not None:
        scale = p.attention_factor
    elif p.mscale and p.mscale_all_dim:
        scale = magnitude(p.mscale) / magnitude(p.mscale_all_dim)
    else:
        scale = magnitude(1.0)
    return plain / factor * ramp + plain * (1 - ramp), scale


def _longrope(head_dim: int, p: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al., 2024): a divisor per dimension, one set up to the trained length, one beyond."""
    dim, trained = _rotary_dim(head_dim, p), p.number("original_max_position_embeddings")
    divisors = p.long_factor if max_len > trained else p.short_factor
    if len(divisors) != dim // 2:
        raise CheckpointError(
            f"longrope in config.json has {len(divisors)} factors for {dim // 2} rotated pairs of features: "
            f"short_factor and long_factor must have {dim // 2} entries"
        )
    factor = p.factor if p.factor is not None else p.max_position_embeddings / trained
    scale = p.attention_factor or (p.long_mscale if max_len > trained else p.short_mscale)
    if scale is None:
        scale = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return _plain(dim, p.rope_theta) / torch.tensor(divisors, dtype=torch.float32), scale


def _proportional(head_dim: int, p: RopeParameters, max_len: int) -> tuple[torch.Tensor, float]:
    """Only the fastest `partial_rotary_factor` of all pairs turn; exponents are those of the whole head."""
    turning = int(p.partial_rotary_factor * head_dim // 2)
    frequencies = _plain(head_dim, p.rope_theta)
    frequencies[turning:] = 0.0
    return frequencies / (p.factor or 1.0), 1.0


SCALINGS: dict[str, Callable[[int, RopeParameters, int], tuple[torch.Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
"""rope_type -> its frequencies."""
