"""bitsandbytes NF4 and FP4: places in a table, two to a byte, scaled by blocks that run over the rows of a matrix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from samovar.quant.base import Dim, FeatureAxis, TensorSpec, Weights
from samovar.quant.bnb_state import BLOCK_SIZE, NESTED_BLOCK_SIZE, coded_blocks, described, made_up
from samovar.quant.numbers.codebooks import VALUES
from samovar.quant.numbers.packing import unpack_pairs
from samovar.quant.scheme import Layer
from samovar.quant.stored import Stored

STATE_BYTES = 160
"""Length of the description that every tensor has, if headers were not read; it is JSON and varies."""


@dataclass(frozen=True, slots=True)
class BnbScheme:
    """`nested`: the scales of blocks are eight-bit places in a table themselves."""

    kind: str
    nested: bool

    def method(self, layer: Layer) -> Bnb4:
        """See `Scheme`."""
        return Bnb4(self, layer)


class Bnb4(Stored):
    """Every part has tensors of its own, called `{name}.{part}`; scales become float32.

    Outputs can be split unless the scales are nested, inputs cannot.
    """

    def __init__(self, scheme: BnbScheme, layer: Layer) -> None:
        self.scheme, self.layer, self.state = scheme, layer, f"weight.quant_state.bitsandbytes__{scheme.kind}"
        nested = [("nested_absmax", torch.float32), ("nested_quant_map", torch.float32)] if scheme.nested else []
        absmax = ("absmax", torch.uint8 if scheme.nested else torch.float32)
        # Rows can be split only where every tensor that runs along them can be.
        rows = () if scheme.nested else (Dim("out"),)
        tensors = [TensorSpec("weight", torch.uint8, rows), TensorSpec(f"weight.{absmax[0]}", absmax[1], rows)]
        tensors += [TensorSpec(f"weight.{name}", kind, ()) for name, kind in (("quant_map", torch.float32), *nested)]
        super().__init__(layer.names, [*tensors, TensorSpec(self.state, torch.uint8, ())], layer.kernels)

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> Weights:
        """See `QuantMethod`."""
        own = {spec.name for spec in self.tensors}
        weights = super().allocate([s for s in specs if s.name not in own], features, part_rows, empty)
        for part, rows in enumerate(self.part_rows):
            for spec in self.tensors:
                shape = self._lengths(part, rows * self.num_inputs)[spec.name]
                weights[f"{spec.name}.{part}"] = empty(*shape, dtype=spec.dtype)
        return weights

    def _lengths(self, part: int, size: int) -> dict[str, tuple[int, ...]]:
        blocks = -(-size // BLOCK_SIZE)
        known = self.layer.shapes.get(f"{self.names[part]}.{self.state}", (STATE_BYTES,))
        return {
            "weight": (-(-size // 2), 1),
            "weight.absmax": (blocks,),
            "weight.quant_map": (16,),
            "weight.nested_absmax": (-(-blocks // NESTED_BLOCK_SIZE),),
            "weight.nested_quant_map": (256,),
            self.state: known,
        }

    def part_of(self, weights: Weights, spec: TensorSpec, part: int, first_row: int, rows: int) -> torch.Tensor:
        """See `QuantMethod`."""
        own = weights.get(f"{spec.name}.{part}")
        return super().part_of(weights, spec, part, first_row, rows) if own is None else own

    def dummy(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """See `QuantMethod`."""
        if name == "quant_map":
            return torch.tensor(VALUES[self.scheme.kind])
        if name != self.state.rpartition(".")[2]:
            return None if like.dtype is torch.uint8 else torch.full_like(like, 2.0**-5)
        return made_up(len(like))

    def repack(self, weights: Weights) -> Weights:
        """See `Stored`."""
        kept = {name: tensor for name, tensor in weights.items() if name == "bias"}
        for part, name in enumerate(self.names[: len(self.part_rows)]):
            state = described(weights[f"{self.state}.{part}"], name)
            absmax = weights[f"weight.absmax.{part}"]
            if self.scheme.nested:
                outer = weights[f"weight.nested_absmax.{part}"].repeat_interleave(NESTED_BLOCK_SIZE)[: len(absmax)]
                absmax = weights[f"weight.nested_quant_map.{part}"][absmax.int()] * outer + float(
                    state["nested_offset"]
                )
            kept[f"weight.{part}"] = weights[f"weight.{part}"].view(-1)
            kept[f"absmax.{part}"], kept[f"map.{part}"] = absmax, weights[f"weight.quant_map.{part}"]
        return kept

    def kind(self) -> str | None:
        """See `Stored`. Blocks run over whole rows only where these have a multiple of their size."""
        return f"{self.scheme.kind}_64" if self.num_inputs % BLOCK_SIZE == 0 else None

    def coded(self, weights: Weights) -> Weights | None:
        """See `Stored`. Only of the table that everyone has."""
        return coded_blocks(self.scheme.kind, weights, self.part_rows, self.num_inputs)

    def rows(self, weights: Weights, first: int, count: int, part: int) -> torch.Tensor:
        """See `Stored`. A block of rows begins with a block of scales, for it has a multiple of 64 rows."""
        start, size = (first - sum(self.part_rows[:part])) * self.num_inputs, count * self.num_inputs
        codes = unpack_pairs(weights[f"weight.{part}"][start // 2 : -(-(start + size) // 2)], high_first=True)[:size]
        scales = weights[f"absmax.{part}"][start // BLOCK_SIZE : -(-(start + size) // BLOCK_SIZE)]
        values = weights[f"map.{part}"][codes.int()] * scales.repeat_interleave(BLOCK_SIZE)[:size]
        return values.view(count, self.num_inputs)
