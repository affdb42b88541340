"""The quantization_config of config.json -> the format of every layer. A format that no file here implements is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from samovar.errors import CheckpointError
from samovar.kernels.op import Kernels
from samovar.quant.base import QuantMethod
from samovar.quant.unquantized import Unquantized


def select(
    stored: Mapping[str, Any] | str | None, dtype: torch.dtype, kernels: Kernels
) -> Callable[[str], QuantMethod]:
    """The format of a layer by its path, from what config.json says is `stored` (None: plain weights).

    Raises `CheckpointError` naming the format if it is not supported.
    """
    if stored:
        name = stored if isinstance(stored, str) else stored.get("quant_method") or stored.get("fmt") or "unnamed"
        raise CheckpointError(
            f"the checkpoint is quantized as {name!r} (says config.json), which is not supported yet: "
            f"use an unquantized checkpoint or a GGUF file of this model"
        )
    plain = Unquantized(dtype, kernels)
    return lambda path: plain
