"""Quantization at load time: the checkpoint is plain, what is kept of it is not. Off unless asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from samovar.errors import ConfigError
from samovar.kernels.op import Kernels
from samovar.kernels.scaled_linear import scaled_linear
from samovar.quant.base import FeatureAxis, TensorSpec, Weights
from samovar.quant.decoded import BLOCK_WEIGHTS
from samovar.quant.delegate import Delegate
from samovar.quant.online_formats import FORMATS, Kept
from samovar.quant.scheme import Layer, Scheme
from samovar.quant.stored import Stored


class Online(Delegate):
    """Plain linears of `dtype` that become `format` after they were loaded."""

    def __init__(self, format: str, dtype: torch.dtype, kernels: Kernels, names: Sequence[str] = ()) -> None:
        super().__init__(kernels)
        if format not in FORMATS:
            raise ConfigError(f"--quantization {format} is not one of {', '.join(FORMATS)}")
        self.format, self.dtype, self.names = format, dtype, tuple(names)
        self.tensors = (TensorSpec("weight", dtype),)
        self.inner: Stored | None = None
        self.device = torch.device("cpu")
        self._part_rows: list[int] = []

    def of_parts(self, names: Sequence[str]) -> Online:
        """See `QuantMethod`."""
        return Online(self.format, self.dtype, self.kernels, names)

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> Weights:
        """See `QuantMethod`. Raises `ConfigError` for groups that do not come out even."""
        self.check(features["in"], FORMATS[self.format].group_size)
        self._part_rows = list(part_rows)
        self.device, self.inner = empty(0).device, self._method(part_rows, features["in"])
        if self.device.type in ("cpu", "meta"):
            return super().allocate(specs, features, part_rows, empty)
        # A GPU need not have room for the plain model: layer by layer it waits in the host's memory.
        plain = super().allocate(self.tensors, features, part_rows, torch.empty)
        return plain | super().allocate([s for s in specs if s.name != "weight"], features, part_rows, empty)

    def check(self, num_inputs: int, group_size: int) -> None:
        """Raise `ConfigError` where groups of the inputs do not come out even."""
        if num_inputs % group_size:
            raise ConfigError(
                f"--quantization {self.format}: {self.names[0]} has {num_inputs} inputs on this rank, which groups of "
                f"{group_size} do not divide; use fp8"
            )

    def resident_bytes(self, weights: Weights, part_rows: Sequence[int]) -> int:
        """See `QuantMethod`."""
        method, kept = self._shapes(part_rows, weights["weight"])
        others = sum(tensor.nbytes for name, tensor in weights.items() if name != "weight")
        return method.resident_bytes(kept, part_rows) + others

    def _shapes(self, part_rows: Sequence[int], weight: torch.Tensor) -> tuple[Stored, Kept]:
        """The format of what becomes of `weight`, and its tensors without memory."""
        method = self._method(part_rows, weight.shape[1])
        features: dict[FeatureAxis, int] = {"out": len(weight), "in": weight.shape[1], "part": len(part_rows)}
        return method, method.allocate(method.tensors, features, part_rows, partial(torch.empty, device="meta"))

    def _scheme(self) -> Scheme:
        made = FORMATS[self.format]
        if made.rounded is None or self.kernels.target.device != "cuda":
            return made.scheme
        self.kernels.use(scaled_linear)
        is_fast = self.kernels.routes[scaled_linear.name].chosen.startswith("triton")
        return made.rounded if is_fast else made.scheme

    def _method(self, part_rows: Sequence[int], num_inputs: int) -> Stored:
        method = self._scheme().method(Layer(self.names, self.kernels))
        method.part_rows, method.num_inputs = list(part_rows), num_inputs
        method.choose_coded()
        return method

    def after_load(self, weights: Weights, part_rows: list[int]) -> Weights:
        """Encode a few rows at a time; the plain weight is not kept."""
        made, weight = FORMATS[self.format], weights["weight"]
        pieces: list[Kept] = []
        step = max(1, BLOCK_WEIGHTS // weight.shape[1])
        for plain in torch.split(weight, list(part_rows)):
            part = plain.to(self.device)
            known = made.of_part(part)
            pieces += [made.encode(rows.float(), known) for rows in torch.split(part, step)]
        kept = {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}
        return self.loaded.for_kernel(kept) | {name: tensor for name, tensor in weights.items() if name != "weight"}

    @property
    def loaded(self) -> Stored:
        """The format of what is kept."""
        if self.inner is None:
            raise RuntimeError(f"{self.names[0]} was multiplied before it was allocated")
        return self.inner

    def held(self, weights: Weights) -> tuple[Stored, Weights]:
        """The format of what is kept, and that; where there is no memory and nothing was loaded, shapes alone."""
        plain = weights.get("weight")
        if plain is not None and plain.is_meta and plain.dtype == self.dtype:
            return self._shapes(self._part_rows, plain)
        return self.loaded, weights
