"""quantization_config -> the format of every layer. A format that no file here implements is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from samovar.errors import CheckpointError
from samovar.kernels.op import Kernels
from samovar.quant.base import QuantMethod
from samovar.quant.unquantized import Unquantized


def select(
    quantization_config: Mapping[str, Any] | None, dtype: torch.dtype, kernels: Kernels
) -> Callable[[str], QuantMethod]:
    """The format of a layer by its path, from config.json's `quantization_config` (None: plain weights).

    Raises `CheckpointError` naming the format if it is not supported.
    """
    if quantization_config:
        name = quantization_config.get("quant_method") or quantization_config.get("fmt") or "unnamed"
        raise CheckpointError(
            f"the checkpoint is quantized as {name!r} (quantization_config in config.json), which is not supported yet: "
            f"use an unquantized checkpoint or a GGUF file of this model"
        )
    plain = Unquantized(dtype, kernels)
    return lambda path: plain
