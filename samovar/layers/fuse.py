"""fuse: a bound model as one flat sequence of calls, in which one kernel does what neighbouring layers did.

`model.forward` is traced once with torch.fx; layers are the leaves of the trace. The graph is first taken apart into the
smallest calls (a norm that adds becomes an add and a norm), then the rules of `layers/fusions.py` join what has a kernel,
and what is left runs as before. The result is compiled to straight Python, so a step costs one call per kernel and
nothing for the tree of modules. Hooks on modules do not run.

Weights, caches and backends are read from the layers at every call: a fused model survives `after_load`, `attach` and
another cache. It does not survive another `bind`, which may change how weights are split: fuse again after that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node, Tracer

from samovar.kernels.op import Kernels
from samovar.layers.arranged import ArrangedLinear, GatedQKVLinear
from samovar.layers.batch import ForwardBatch
from samovar.layers.fusions import ROW_WISE, RULES, call, given, replace, residual_add
from samovar.layers.last_rows import LastRows, cut_last_rows
from samovar.layers.layer import Layer
from samovar.layers.linear import Linear, QKVLinear, RowLinear
from samovar.layers.norm import AddRMSNorm, RMSNorm

UNTRACEABLE = (ValueError, TypeError, AttributeError, LookupError, RuntimeError)
"""What code that was written for tensors raises when it is run on stand-ins for them."""


@dataclass(frozen=True, slots=True)
class FusedModel:
    """Computes what the model computes: `ForwardBatch` -> hidden states.

    `counts` says how often each rule of `RULES` was applied, `lines` the same in words, or why nothing was fused.
    `last_rows` computes only some rows from the last attention on; None if that cannot be done, and `lines` says why.
    """

    forward: Callable[[ForwardBatch], torch.Tensor]
    counts: dict[str, int]
    lines: list[str]
    last_rows: LastRows | None = None

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states after the final norm, [tokens, hidden]."""
        return self.forward(batch)


class LayerTracer(Tracer):
    """Records calls of layers; everything else is traced through."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """A layer, unless it is made of layers."""
        if isinstance(m, Layer):
            return not any(isinstance(part, Layer) for part in m.modules() if part is not m)
        return super().is_leaf_module(m, module_qualified_name)


def fuse(model: nn.Module, kernels: Kernels) -> FusedModel:
    """Trace `model`, which must be bound, and join what has a kernel. No other thread may run a model meanwhile: tracing
    changes `nn.Module` as long as it lasts.

    A model that cannot be traced runs as it is, and `lines` says why.
    """
    graph = trace_calls(model)
    if isinstance(graph, str):
        return FusedModel(model, {}, [f"nothing is fused, {graph}"])
    counts, lines = dict[str, int](), []
    for rule in RULES:
        answers = [answer for node in list(graph.nodes) if (answer := rule.apply(graph, node, kernels)) is not None]
        counts[rule.name] = sum(answers)
        if answers:
            lines.append(f"fused {rule.name}: {sum(answers)} of {len(answers)} {rule.anchors}")
    last_rows = cut_last_rows(graph)
    if isinstance(last_rows, str):
        lines.append(f"all rows pass the last layer: {last_rows}")
    else:
        lines.append("only rows that sample pass the last layer")
    graph.lint()
    forward = GraphModule(nn.Module(), graph, "FusedModel").forward
    return FusedModel(forward, counts, lines, None if isinstance(last_rows, str) else last_rows)


def trace_calls(model: nn.Module) -> Graph | str:
    """The smallest calls of the layers of a bound model, in order; or why it cannot be traced. See `fuse` for threads."""
    try:
        graph = LayerTracer().trace(model)
    except UNTRACEABLE as error:
        return f"{type(model).__name__} cannot be traced: {type(error).__name__}: {error}"
    for node in list(graph.nodes):
        if node.op == "call_module":
            _take_apart(graph, node, model.get_submodule(str(node.target)))
        elif node.op == "get_attr":
            _read_at_call(graph, node, model)
    return graph


def _take_apart(graph: Graph, node: Node, layer: nn.Module) -> None:
    """Replace the call of a module by the smallest bound methods that do the same."""
    forward = type(layer).forward
    if isinstance(layer, AddRMSNorm) and forward is AddRMSNorm.forward and _gives_pair(node):
        x, residual = given(node)
        total = x if residual is None else call(graph, node, residual_add, x, residual)
        items = call(graph, node, layer.normed, total), total
        for user in list(node.users):
            replace(graph, user, items[given(user)[1]])
    elif isinstance(layer, ArrangedLinear) and all(user.target is getitem for user in node.users):
        y = call(graph, node, layer.project, *node.args, **node.kwargs)
        parts = [call(graph, node, layer.part, y, index) for index in range(len(layer.widths))]
        for part in parts:
            part.meta[ROW_WISE] = True
        if isinstance(layer, GatedQKVLinear):
            heads = call(graph, node, layer.heads_of, parts[1])
            parts = [*(call(graph, node, getitem, heads, index) for index in range(3)), parts[0]]
        for user in list(node.users):
            replace(graph, user, parts[given(user)[1]])
    elif isinstance(layer, QKVLinear) and forward is QKVLinear.forward:
        y = call(graph, node, layer.project, *node.args, **node.kwargs)
        replace(graph, node, call(graph, node, layer.heads_of, y))
    else:
        replace(graph, node, call(graph, node, _smallest(layer), *node.args, **node.kwargs))


def _gives_pair(node: Node) -> bool:
    """Whether the results are only ever used apart, and the arguments stand in order."""
    apart = all(user.target is getitem and given(user)[1] in (0, 1) for user in node.users)
    return apart and bool(node.users) and len(node.args) == 2 and not node.kwargs


def _smallest(layer: nn.Module) -> Callable[..., Any]:
    """The method that does what `layer.forward` does, named so that rules recognise it; a subclass may differ."""
    forward = type(layer).forward
    if isinstance(layer, Linear):
        if forward is Linear.forward or (forward is RowLinear.forward and layer.tp.size == 1):
            return layer.project
    elif isinstance(layer, RMSNorm) and forward is RMSNorm.forward:
        return layer.normed
    return layer.forward


def _read_at_call(graph: Graph, node: Node, model: nn.Module) -> None:
    """A tensor that belongs to a module: read it anew in every call."""
    path, _, name = str(node.target).rpartition(".")
    owner = model.get_submodule(path)

    def read() -> Any:
        return getattr(owner, name)

    replace(graph, node, call(graph, node, read))
