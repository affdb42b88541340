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
from samovar.quant.in_library import in_library
from samovar.quant.mixed import mixed
from samovar.quant.online_in_library import at_load
from samovar.quant.scheme import Layer, Scheme, SchemeOf, Shapes
from samovar.quant.settings import Settings
from samovar.quant.unquantized import Unquantized

HEAD = "lm_head"
TABLES = ("embed_tokens", HEAD)
"""Layers that look rows up or give logits."""
ALIASES = {"intel/auto-round": "auto-round", "modelopt_fp4": "modelopt", "modelopt_mixed": "modelopt"}


class Selected(QuantMethod):
    """The format of a layer, once it is known which of the checkpoint's linears it joins."""

    tensors = ()

    def __init__(self, scheme_of: SchemeOf, plain: QuantMethod, tables: QuantMethod, shapes: Shapes) -> None:
        super().__init__(plain.kernels)
        self.scheme_of, self.plain, self.tables, self.shapes = scheme_of, plain, tables, shapes

    def of_parts(self, names: Sequence[str]) -> QuantMethod:
        """See `QuantMethod`. Parts that are stored differently have a format each."""
        stored = [name.removesuffix(".weight") for name in names]
        schemes = [self.scheme_of(name) for name in stored]
        if all(scheme == schemes[0] for scheme in schemes):
            return self._method(schemes[0], stored)
        return mixed([self._method(scheme, [name]) for scheme, name in zip(schemes, stored, strict=True)])

    def _method(self, scheme: Scheme | None, names: Sequence[str]) -> QuantMethod:
        if scheme is None:
            return self.plain.of_parts([f"{name}.weight" for name in names])
        return in_library(scheme.method(Layer(tuple(names), self.kernels, self.shapes)), self.tables)


class SelectedHead(Selected):
    """The same for the output head, where the checkpoint has that quantized."""

    holds_tables = True


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
    linears = tables if online is None else at_load(online, dtype, tables)
    if not stored:
        return lambda path: tables if path.rpartition(".")[2] in TABLES else linears
    scheme_of = read(stored)
    selected = Selected(scheme_of, linears, tables, shapes or {})
    head = SelectedHead(scheme_of, tables, tables, shapes or {})

    def quant_for(path: str) -> QuantMethod:
        name = path.rpartition(".")[2]
        if name not in TABLES:
            return selected
        return head if name == HEAD and scheme_of(path) is not None else tables

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
