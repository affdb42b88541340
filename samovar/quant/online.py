"""Quantization at load time: the checkpoint is plain, what is kept of it is not. Off unless asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from samovar.errors import ConfigError
from samovar.kernels.op import Kernels
from samovar.quant.base import FeatureAxis, QuantMethod, TensorSpec
from samovar.quant.online_formats import FORMATS, Kept
from samovar.quant.scheme import Layer
from samovar.quant.stored import BLOCK_WEIGHTS, Stored


class Online(QuantMethod):
    """Plain linears of `dtype` that become `format` after they were loaded."""

    def __init__(self, format: str, dtype: torch.dtype, kernels: Kernels, names: Sequence[str] = ()) -> None:
        super().__init__(kernels)
        if format not in FORMATS:
            raise ConfigError(f"--quantization {format} is not one of {', '.join(FORMATS)}")
        self.format, self.dtype, self.names = format, dtype, tuple(names)
        self.tensors = (TensorSpec("weight", dtype),)
        self.inner: Stored | None = None

    def of_parts(self, names: Sequence[str]) -> Online:
        """See `QuantMethod`."""
        return Online(self.format, self.dtype, self.kernels, names)

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """See `QuantMethod`. Raises `ConfigError` for groups that do not come out even."""
        made = FORMATS[self.format]
        if features["in"] % made.group_size:
            raise ConfigError(
                f"--quantization {self.format}: {self.names[0]} has {features['in']} inputs on this rank, which groups "
                f"of {made.group_size} do not divide; use fp8 or int8"
            )
        return super().allocate(specs, features, part_rows, empty)

    def resident_bytes(self, weights: dict[str, torch.Tensor], part_rows: Sequence[int]) -> int:
        """See `QuantMethod`."""
        method, weight = self._method(part_rows, weights["weight"].shape[1]), weights["weight"]
        features: dict[FeatureAxis, int] = {"out": len(weight), "in": weight.shape[1], "part": len(part_rows)}
        kept = method.allocate(method.tensors, features, part_rows, partial(torch.empty, device="meta"))
        others = sum(tensor.nbytes for name, tensor in weights.items() if name != "weight")
        return method.resident_bytes(kept, part_rows) + others

    def _method(self, part_rows: Sequence[int], num_inputs: int) -> Stored:
        method = FORMATS[self.format].scheme.method(Layer(self.names, self.kernels))
        method.part_rows, method.num_inputs = list(part_rows), num_inputs
        return method

    def after_load(self, weights: dict[str, torch.Tensor], part_rows: list[int]) -> dict[str, torch.Tensor]:
        """Encode a few rows at a time; the plain weight is not kept."""
        made, weight = FORMATS[self.format], weights["weight"]
        self.inner = self._method(part_rows, weight.shape[1])
        pieces: list[Kept] = []
        step = max(1, BLOCK_WEIGHTS // weight.shape[1])
        for part in torch.split(weight, list(part_rows)):
            known = made.of_part(part)
            pieces += [made.encode(rows.float(), known) for rows in torch.split(part, step)]
        kept = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return kept | {name: tensor for name, tensor in weights.items() if name != "weight"}

    def multiply(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `QuantMethod`."""
        if self.inner is None:
            raise RuntimeError(f"{self.names[0]} was multiplied before it was loaded")
        return self.inner.multiply(x, weights, bias)
