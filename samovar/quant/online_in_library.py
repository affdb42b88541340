"""Quantization at load time for the CPU library: what plain weights become, held as blocks or as numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from samovar.native.matrix import packed_bytes
from samovar.quant.base import FeatureAxis, QuantMethod, TensorSpec
from samovar.quant.formats import BLOCKS, WeightFormat
from samovar.quant.held import Held, Integers, by_rows
from samovar.quant.numbers import encode
from samovar.quant.numbers.ggml_blocks import BLOCK
from samovar.quant.numbers.small_floats import decode_e2m1, decode_ue8m0
from samovar.quant.online import Online
from samovar.quant.packed import Packed


def _int8(weight: torch.Tensor) -> Integers:
    return encode.int8_groups(weight, BLOCK)


def _int4(weight: torch.Tensor) -> Integers:
    codes, scale = encode.int4_groups(weight, BLOCK)
    return codes.to(torch.int8) - 8, scale


def _mxfp4(weight: torch.Tensor) -> Integers:
    codes, scale = encode.mxfp4_groups(weight, BLOCK)
    return (decode_e2m1(codes) * 2).to(torch.int8), (decode_ue8m0(scale) / 2).half()


INTEGERS: dict[str, tuple[WeightFormat, Callable[[torch.Tensor], Integers]]] = {
    "int8": (BLOCKS["Q8_0"], _int8),
    "int4": (BLOCKS["Q4_0"], _int4),
    "mxfp4": (BLOCKS["Q5_0"], _mxfp4),
}
"""What `--quantization` may say and is an integer times a scale: blocks that hold it, and how it is made of some rows."""


def at_load(format: str, dtype: torch.dtype, plain: QuantMethod) -> QuantMethod:
    """What plain linears of `dtype` become, as the CPU library holds it if `plain` is the library's."""
    online = Online(format, dtype, plain.kernels)
    return OnlineInLibrary(online, plain) if isinstance(plain, Packed) else online


class OnlineInLibrary(Held):
    """Plain linears that `online` encodes. Before `of_parts`: of a whole model."""

    def __init__(self, online: Online, plain: Packed, names: Sequence[str] = ()) -> None:
        has_blocks = online.format in INTEGERS and plain.plain.dtype is not torch.float32
        format = INTEGERS[online.format][0] if has_blocks else plain.plain
        super().__init__(plain.plain, plain.products, plain.kernels, formats=(format,) * max(1, len(names)))
        self.online, self.base, self.tensors = online, plain, online.tensors
        if not has_blocks:
            self.note = f"--quantization {online.format}, held as {format.name}: no smaller than plain weights"

    def of_parts(self, names: Sequence[str]) -> OnlineInLibrary:
        """See `QuantMethod`."""
        return OnlineInLibrary(self.online.of_parts(names), self.base, names)

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """See `QuantMethod`. Raises `ConfigError` for groups that do not come out even."""
        if self.formats[0].has_blocks:
            self.online.check(features["in"], BLOCK)
        return self.online.allocate(specs, features, part_rows, empty)

    def part_of(
        self, weights: dict[str, torch.Tensor], spec: TensorSpec, part: int, first_row: int, rows: int
    ) -> torch.Tensor:
        """See `QuantMethod`."""
        return self.online.part_of(weights, spec, part, first_row, rows)

    def resident_bytes(self, weights: dict[str, torch.Tensor], part_rows: Sequence[int]) -> int:
        """See `QuantMethod`."""
        code, cols = self.formats[0].code, weights["weight"].shape[1]
        others = sum(tensor.nbytes for name, tensor in weights.items() if name != "weight")
        return others + sum(packed_bytes(code, rows, cols) for rows in part_rows)

    def after_load(self, weights: dict[str, torch.Tensor], part_rows: list[int]) -> dict[str, torch.Tensor]:
        """Encode a few rows at a time; the plain weight is not kept."""
        bias = {name: tensor for name, tensor in weights.items() if name != "weight"}
        if not self.formats[0].has_blocks:
            kept = self.online.after_load(weights, part_rows)
            return self.hold_numbers(self.online.loaded, kept) | bias
        encoded = INTEGERS[self.online.format][1]

        def part(plain: torch.Tensor) -> Integers:
            levels = torch.empty(plain.shape, dtype=torch.int8)
            scale = torch.empty(len(plain), plain.shape[1] // BLOCK, dtype=torch.float16)

            def fill(rows: slice) -> None:
                levels[rows], scale[rows] = encoded(plain[rows].float())

            by_rows(fill, len(plain), plain.shape[1], self.products.num_threads)
            return levels, scale

        return self.hold_integers(part(plain) for plain in torch.split(weights["weight"], part_rows)) | bias
