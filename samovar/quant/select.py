"""The quantization_config of config.json -> the format of every layer. A format that no file here implements is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch

from samovar.errors import CheckpointError
from samovar.kernels.op import Kernels
from samovar.quant import declared as rooms
from samovar.quant.base import QuantMethod
from samovar.quant.online import Online
from samovar.quant.scheme import Layer, Scheme, SchemeOf, Shapes
from samovar.quant.settings import Settings
from samovar.quant.unquantized import Unquantized

TABLES = ("embed_tokens", "lm_head")
"""Layers that look rows up or give logits."""
ALIASES = {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt"}


class Selected(QuantMethod):
    """The format of a layer, once it is known which of the checkpoint's linears it joins."""

    tensors = ()

    def __init__(self, scheme_of: SchemeOf, plain: QuantMethod, shapes: Shapes) -> None:
        super().__init__(plain.kernels)
        self.scheme_of, self.plain, self.shapes = scheme_of, plain, shapes

    def of_parts(self, names: Sequence[str]) -> QuantMethod:
        """See `QuantMethod`. Raises `CheckpointError` where parts that are joined are stored differently."""
        layer = Layer(tuple(name.removesuffix(".weight") for name in names), self.kernels, self.shapes)
        schemes = {name: self.scheme_of(name) for name in layer.names}
        first = schemes[layer.names[0]]
        if any(scheme != first for scheme in schemes.values()):
            listed = ", ".join(f"{name} {scheme or 'plain'}" for name, scheme in schemes.items())
            raise CheckpointError(f"linears that are one here must be quantized alike, but the checkpoint has {listed}")
        return self.plain.of_parts(names) if first is None else first.method(layer)


def select(
    stored: Mapping[str, Any] | str | None,
    dtype: torch.dtype,
    kernels: Kernels,
    *,
    plain: QuantMethod | None = None,
    shapes: Shapes | None = None,
    online: str | None = None,
) -> Callable[[str], QuantMethod]:
    """The format of a layer by its path, from what config.json says is `stored` (None: plain weights).

    `plain` is the format of what is not quantized; `shapes` are those of the checkpoint's tensors, by which variants
    that config.json leaves open are told apart; `online` is what linears that are plain become at load time. Raises
    `CheckpointError` naming what is not supported.
    """
    tables = plain or Unquantized(dtype, kernels)
    linears = tables if online is None else Online(online, dtype, kernels)
    scheme_of = read(stored) if stored else None
    selected = linears if scheme_of is None else Selected(scheme_of, linears, shapes or {})

    def quant_for(path: str) -> QuantMethod:
        if path.rpartition(".")[2] not in TABLES:
            return selected
        if scheme_of is None:
            return tables
        scheme = scheme_of(path) if path == "lm_head" else None
        if scheme is not None:
            raise CheckpointError(f"{path} is quantized ({_named(scheme)}), which is not supported yet: leave it plain")
        return tables

    return quant_for


def read(stored: Mapping[str, Any] | str) -> SchemeOf:
    """What a quantization_config says about each linear."""
    if isinstance(stored, str):
        raise _unsupported(stored)
    name = str(stored.get("quant_method") or stored.get("fmt") or "unnamed")
    room = ALIASES.get(name, name).replace("-", "_")
    if room not in {module.name for module in iter_modules(rooms.__path__)}:
        raise _unsupported(name)
    found: SchemeOf = import_module(f"{rooms.__name__}.{room}").read(Settings(stored))
    return found


def _unsupported(name: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is quantized as {name!r} (says config.json), which is not supported yet: "
        f"use an unquantized checkpoint or a GGUF file of this model"
    )


def _named(scheme: Scheme) -> str:
    return type(scheme).__name__.removesuffix("Scheme")
