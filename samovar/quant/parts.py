"""Parts of one linear that have a format and tensors of their own each."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from samovar.quant.base import FeatureAxis, QuantMethod, TensorSpec

Tensors = dict[str, torch.Tensor]


class Parts:
    """The tensors of part i are called "i/name"."""

    def __init__(self, methods: Sequence[QuantMethod]) -> None:
        self.methods = list(methods)

    def tensors_of(self, part: int) -> tuple[TensorSpec, ...]:
        """See `QuantMethod`."""
        return self.methods[part].tensors

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> Tensors:
        """See `QuantMethod`. `specs` are what the layer itself adds."""
        weights: Tensors = {spec.name: empty(*spec.shape(features), dtype=spec.dtype) for spec in specs}
        for part, (method, rows) in enumerate(zip(self.methods, part_rows, strict=True)):
            own = method.allocate(method.tensors, {**features, "out": rows, "part": 1}, [rows], empty)
            weights |= {f"{part}/{name}": tensor for name, tensor in own.items()}
        return weights

    def part_of(self, weights: Tensors, spec: TensorSpec, part: int, first_row: int, rows: int) -> torch.Tensor:
        """See `QuantMethod`."""
        if spec.name in weights:
            return weights[spec.name].narrow(0, first_row, rows)
        return self.methods[part].part_of(self.of(weights, part), spec, 0, 0, rows)

    def resident_bytes(self, weights: Tensors, part_rows: Sequence[int]) -> int:
        """See `QuantMethod`."""
        own = sum(
            method.resident_bytes(self.of(weights, part), [rows])
            for part, (method, rows) in enumerate(zip(self.methods, part_rows, strict=True))
        )
        return own + sum(tensor.nbytes for name, tensor in weights.items() if "/" not in name)

    def loaded(self, weights: Tensors, part_rows: Sequence[int]) -> Tensors:
        """`after_load` of every part."""
        kept = {name: tensor for name, tensor in weights.items() if "/" not in name}
        for part, (method, rows) in enumerate(zip(self.methods, part_rows, strict=True)):
            own = {name: weights.pop(f"{part}/{name}") for name in self.of(weights, part)}
            kept |= {f"{part}/{name}": tensor for name, tensor in method.after_load(own, [rows]).items()}
        return kept

    def of(self, weights: Tensors, part: int) -> Tensors:
        """The tensors of one part by their own names."""
        start = f"{part}/"
        return {name.removeprefix(start): tensor for name, tensor in weights.items() if name.startswith(start)}

    def dummy(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """See `QuantMethod`: of the first part that knows."""
        found = (method.dummy(name, like) for method in self.methods)
        return next((values for values in found if values is not None), None)
