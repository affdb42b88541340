"""GGUF files on a GPU: which tensors stay blocks, and what becomes of all others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from samovar.kernels.op import Kernels
from samovar.quant.base import QuantMethod
from samovar.quant.coded import has_kernel
from samovar.quant.gguf_coded import GGUFCoded
from samovar.quant.mixed import mixed
from samovar.quant.numbers.gguf_blocks import CODED
from samovar.quant.unquantized import Unquantized

TABLES = ("embed_tokens", "lm_head")
"""Layers that are held as plain numbers."""
NUMBERS = ("F32", "F16", "BF16", "F64")
"""Types that are numbers in the file."""


class GGUFOnGPU(QuantMethod):
    """A whole GGUF model: `types` by the names of its tensors; what is not coded is of `dtype`."""

    def __init__(self, types: Mapping[str, str], dtype: torch.dtype, kernels: Kernels) -> None:
        super().__init__(kernels)
        self.plain = Unquantized(dtype, kernels)
        self.types, self.dtype, self.tensors = types, dtype, self.plain.tensors
        self.coded: set[str] = set()
        """Names of tensors that are wanted as the file has them."""
        if has_kernel(kernels):
            linears = (name for name in types if name.split(".")[-2] not in TABLES)
            self.coded = {name for name in linears if types[name] in CODED}

    def of_parts(self, names: Sequence[str]) -> QuantMethod:
        """See `QuantMethod`."""
        types = [self.types.get(name, "") for name in names]
        if len(set(types)) == 1:
            return self._method(types[0], names)
        return mixed([self._method(type, [name]) for type, name in zip(types, names, strict=True)])

    def _method(self, type: str, names: Sequence[str]) -> QuantMethod:
        if names[0] in self.coded:
            return GGUFCoded(type, [name.removesuffix(".weight") for name in names], self.kernels)
        plain = Unquantized(self.dtype, self.kernels)
        if type and type not in NUMBERS:
            plain.note = f"{type}, for which there is no kernel: held as {str(self.dtype).removeprefix('torch.')}"
        return plain
