"""Weights packed for the CPU library: plain numbers and GGML's blocks, each as precise as the checkpoint has them.

A Linear that joins several checkpoint linears may have another format in each. What was loaded is packed where it lies
if the packed form takes the same room; otherwise layer by layer, so that little memory is taken twice.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch

from samovar.kernels.op import Kernels
from samovar.native.abi import CMatrix
from samovar.native.matrix import packed_bytes
from samovar.quant.base import FeatureAxis, QuantMethod, TensorSpec
from samovar.quant.checks import Check, Use
from samovar.quant.formats import WeightFormat
from samovar.quant.packing import columns, pack, room_for, spec_of
from samovar.quant.products import Products


class Packed(QuantMethod):
    """The weights of a layer, or before `of_parts` of a model: `stored` says by the checkpoint's names which have a form
    of their own, all others are `plain` numbers. `matrices`, the packed parts in order, exist from `after_load` on.
    """

    holds_tables: ClassVar[bool] = True

    def __init__(
        self,
        plain: WeightFormat,
        products: Products,
        kernels: Kernels,
        stored: Mapping[str, WeightFormat] = MappingProxyType({}),
        formats: Sequence[WeightFormat] = (),
    ) -> None:
        super().__init__(kernels)
        self.plain, self.products, self.stored = plain, products, stored
        self.formats = tuple(formats) or (plain,)
        self.tensors = (spec_of(self.formats[0]),)
        self.matrices: ctypes.Array[CMatrix] = (CMatrix * 0)()

    def of_parts(self, names: Sequence[str]) -> Packed:
        """See `QuantMethod`."""
        formats = [self.stored.get(name, self.plain) for name in names]
        return Packed(self.plain, self.products, self.kernels, self.stored, formats)

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """One tensor for each part that the checkpoint stores by itself."""
        others = [spec for spec in specs if spec.name != "weight"]
        weights = super().allocate(others, features, part_rows, empty)
        if len(self.formats) == 1:
            return {"weight": room_for(self.formats[0], features, part_rows, empty, self.products.pages), **weights}
        parts = {
            f"weight.{part}": room_for(format, {**features, "out": rows}, [rows], empty, self.products.pages)
            for part, (format, rows) in enumerate(zip(self.formats, part_rows, strict=True))
        }
        return {**parts, **weights}

    def part_of(
        self, weights: dict[str, torch.Tensor], spec: TensorSpec, part: int, first_row: int, rows: int
    ) -> torch.Tensor:
        """See `QuantMethod`."""
        own = weights.get(f"{spec.name}.{part}")
        return super().part_of(weights, spec, part, first_row, rows) if own is None else own

    def resident_bytes(self, weights: dict[str, torch.Tensor], part_rows: Sequence[int]) -> int:
        """See `QuantMethod`."""
        others = sum(tensor.nbytes for name, tensor in weights.items() if not name.startswith("weight"))
        if len(self.formats) == 1:
            loaded = [(self.formats[0], rows, weights["weight"]) for rows in part_rows]
        else:
            tensors = [weights[f"weight.{part}"] for part in range(len(self.formats))]
            loaded = [(format, len(raw), raw) for format, raw in zip(self.formats, tensors, strict=True)]
        return others + sum(packed_bytes(format.code, rows, columns(format, raw)) for format, rows, raw in loaded)

    def after_load(self, weights: dict[str, torch.Tensor], part_rows: list[int]) -> dict[str, torch.Tensor]:
        """Pack every part. Those that the checkpoint stores joined stay in one tensor."""
        kept = {name: tensor for name, tensor in weights.items() if not name.startswith("weight")}
        loaded = {name: weights.pop(name) for name in list(weights) if name not in kept}
        packed, matrices, pages = dict[str, torch.Tensor](), list[CMatrix](), self.products.pages
        while loaded:
            name = next(iter(loaded))
            format, rows = self.formats[len(packed)], part_rows if len(self.formats) == 1 else [len(loaded[name])]
            packed[name], described = pack(format, loaded.pop(name), rows, self.products.num_threads, pages)
            matrices += described
        self.matrices = (CMatrix * len(matrices))(*matrices)
        return {**packed, **kept}

    def multiply(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `QuantMethod`. Computed in float32, whatever x is."""
        return self.products.linear(x, self.matrices, bias)

    def checks(self, weights: dict[str, torch.Tensor], use: Use) -> list[Check]:
        """See `QuantMethod`: of blocks, some rows, beside what the library decodes them to."""
        parts = zip(
            self.formats if len(self.formats) > 1 else self.formats * len(self.matrices), self.matrices, strict=True
        )
        return [self.products.check(format.name, matrix) for format, matrix in parts if format.has_blocks]

    def look_up(self, token_ids: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """See `QuantMethod`."""
        return self.products.look_up(token_ids, self.matrices)

    def logits(self, x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        """See `QuantMethod`."""
        return self.products.linear(x.float(), self.matrices)
