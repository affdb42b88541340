"""A scheme: what config.json says about the weights of one linear, before it is known where they are put."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from samovar.kernels.op import Kernels
from samovar.quant.stored import Stored

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a checkpoint's tensors by their names, as its headers tell them."""


@dataclass(frozen=True, slots=True)
class Layer:
    """The checkpoint's linears `names` that one layer joins. `shapes` is empty where headers were not read."""

    names: tuple[str, ...]
    kernels: Kernels
    shapes: Shapes = field(default_factory=dict)

    def has(self, suffix: str, *, otherwise: bool) -> bool:
        """Whether the checkpoint has this tensor for one of the linears; `otherwise` is the guess without headers."""
        return any(f"{name}.{suffix}" in self.shapes for name in self.names) if self.shapes else otherwise

    def one_of(self, suffixes: Sequence[str]) -> str:
        """The first of these tensors that the checkpoint has; the first of all without headers."""
        return next((suffix for suffix in suffixes if self.has(suffix, otherwise=True)), suffixes[0])

    def shape(self, suffix: str) -> tuple[int, ...] | None:
        """Its shape for the first of the linears; None if that is not known."""
        return self.shapes.get(f"{self.names[0]}.{suffix}")


class Scheme(Protocol):
    """What is known of the weights of a linear. Two schemes that are equal can share a matrix."""

    def method(self, layer: Layer) -> Stored:
        """The format of a layer that is stored so."""
        ...


SchemeOf = Callable[[str], Scheme | None]
"""A linear's name in the checkpoint -> how it is stored; None: plainly."""
