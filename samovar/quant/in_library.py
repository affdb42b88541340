"""Quantized checkpoints as the CPU library holds weights, so that whole steps run on it.

Integers less their zero point are GGML's blocks exactly where groups are whole blocks and scales float16 numbers (a
bfloat16 scale below 6e-5 is rounded to one). What fits no block becomes plain numbers, rounded as on a GPU; in float32
everything does, for there products are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from samovar.native.matrix import packed_bytes
from samovar.quant.awq import AWQ
from samovar.quant.base import FeatureAxis, QuantMethod, TensorSpec
from samovar.quant.formats import BLOCKS, WeightFormat
from samovar.quant.gptq import GPTQ
from samovar.quant.grouped import Grouped
from samovar.quant.held import Held
from samovar.quant.mxfp4 import MXFP4
from samovar.quant.numbers.ggml_blocks import BLOCK, narrowest
from samovar.quant.packed import Packed
from samovar.quant.packed_int import PackedInt
from samovar.quant.rounded import Rounded
from samovar.quant.small_integers import integers
from samovar.quant.stored import Stored


def in_library(method: Stored, plain: QuantMethod) -> QuantMethod:
    """`method` as the CPU library holds it, if `plain` is the library's; else `method` itself.

    In float32 a format that rounds activations stays as it is, and is multiplied by torch, which rounds them.
    """
    if not isinstance(plain, Packed):
        return method
    is_exact, rounds = plain.plain.dtype is torch.float32, isinstance(method, Rounded) and method.inputs is not None
    if is_exact and rounds:
        method.note = f"{type(method).__name__}, multiplied by torch, which rounds activations"
        return method
    found = "float32 is exact" if is_exact else block_format(method)
    if isinstance(found, WeightFormat):
        return InLibrary(method, plain, found)
    held = InLibrary(method, plain, plain.plain)
    also = ", activations are not rounded" if rounds else ""
    held.note = f"{type(method).__name__} ({found}), held as {plain.plain.name}{also}"
    return held


def block_format(method: Stored) -> WeightFormat | str:
    """The narrowest blocks that are expected to hold weights of `method` exactly, or why there are none."""
    if isinstance(method, MXFP4):
        return BLOCKS["Q5_0"]  # halves up to twelve, as E2M1 counts
    if not isinstance(method, GPTQ | AWQ | PackedInt):
        return "the library has no blocks of such numbers"
    if method.group_size % BLOCK and method.group_size != -1:
        return f"groups of {method.group_size} inputs are not whole blocks of {BLOCK}"
    if isinstance(method, PackedInt) and method.inputs is not None:
        return "made for rounded activations"
    has_order = isinstance(method, GPTQ) and method.scheme.has_order
    if has_order or any(spec.name == "weight_g_idx" for spec in method.tensors):
        return "act-order mixes its groups"
    bits = 4 if isinstance(method, AWQ) else method.scheme.bits
    if not isinstance(method, AWQ) and method.scheme.is_symmetric:
        name = narrowest(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    else:
        name = narrowest(1 - (1 << bits), (1 << bits) - 1)
    return f"{bits} bits less a zero point do not fit a byte" if name is None else BLOCKS[name]


class InLibrary(Held):
    """Loaded as `method` stores it, held as `format`, which is what is expected to hold it: blocks, or plain numbers."""

    may_store_zero_bias = True

    def __init__(self, method: Stored, plain: Packed, format: WeightFormat) -> None:
        super().__init__(plain.plain, plain.products, plain.kernels, formats=(format,) * len(method.names))
        self.method, self.tensors = method, method.tensors

    def allocate(
        self,
        specs: Sequence[TensorSpec],
        features: dict[FeatureAxis, int],
        part_rows: Sequence[int],
        empty: Callable[..., torch.Tensor],
    ) -> dict[str, torch.Tensor]:
        """See `QuantMethod`."""
        if features["in"] % BLOCK:
            self.formats = (self.plain,) * len(self.formats)
        return self.method.allocate(specs, features, part_rows, empty)

    def part_of(
        self, weights: dict[str, torch.Tensor], spec: TensorSpec, part: int, first_row: int, rows: int
    ) -> torch.Tensor:
        """See `QuantMethod`."""
        return self.method.part_of(weights, spec, part, first_row, rows)

    def dummy(self, name: str, like: torch.Tensor) -> torch.Tensor | None:
        """See `QuantMethod`."""
        return self.method.dummy(name, like)

    def resident_bytes(self, weights: dict[str, torch.Tensor], part_rows: Sequence[int]) -> int:
        """See `QuantMethod`. More where blocks turn out to hold less than was declared."""
        code, bias = self.formats[0].code, weights.get("bias")
        packed = sum(packed_bytes(code, rows, self.method.num_inputs) for rows in part_rows)
        return packed + (0 if bias is None else bias.nbytes)

    def after_load(self, weights: dict[str, torch.Tensor], part_rows: list[int]) -> dict[str, torch.Tensor]:
        """Part by part: integers and scales, blocks, packed."""
        bias, method = weights.get("bias"), self.method
        found = method.repack(weights)
        pieces = None
        if self.formats[0].has_blocks and "g_idx" not in found:
            assert isinstance(method, Grouped)
            pieces = integers(method, found, self.products.num_threads)
        held = self.hold_numbers(method, found) if pieces is None else self.hold_integers(pieces)
        return held | ({} if bias is None else {"bias": bias})
