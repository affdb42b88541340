"""Which linears several devices share, by the plan of Transformers' model: pairs of columns and rows, as in native families.

What the plan does not split in such a pair is computed on every device; embeddings, head and experts are shared anyway.
"""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from samovar.models.generic.attention import RoutedAttention
from samovar.models.generic.held import Held
from samovar.models.generic.layers import GenericLinear

STYLES: dict[str | None, Any] = {"colwise": "out", "rowwise": "in"}
"""Word of a plan -> the features of a linear that are shared."""


def split(body_name: str, body: nn.Module, plan: dict[str, str]) -> None:
    """Tell linears and attention layers that are shared so, before they are bound."""
    patterns = [
        (re.compile(rf"(.*\.)?{re.escape(name).replace(re.escape('*'), '[^.]+')}"), style)
        for name, style in plan.items()
    ]
    for path, parent in body.named_modules(prefix=body_name):
        linears = {name: child for name, child in parent.named_children() if isinstance(child, GenericLinear)}
        styles = {name: _style(f"{path}.{name}", patterns) for name in linears}
        if "rowwise" not in styles.values() or not set(styles.values()) <= STYLES.keys():
            continue
        layers = [child for child in parent.children() if isinstance(child, RoutedAttention)]
        if layers and not all(_has_free_heads(parent, layer) for layer in layers):
            continue
        for name, linear in linears.items():
            linear.split = STYLES[styles[name]]
        for layer in layers:
            layer.is_split = True


def _style(path: str, patterns: list[tuple[re.Pattern[str], str]]) -> str | None:
    """What the plan says of a linear."""
    return next((style for pattern, style in patterns if pattern.fullmatch(path)), None)


def _has_free_heads(parent: nn.Module, layer: RoutedAttention) -> bool:
    """Whether no tensor beside the linears runs along all heads."""
    own: list[Any] = [tensor for held in parent.modules() if isinstance(held, Held) for tensor in held.tensors]
    sizes = {layer.key_dim, layer.value_dim, 1}
    return not layer.has_sinks and all(len(tensor.shape) <= 1 and set(tensor.shape) <= sizes for tensor in own)
