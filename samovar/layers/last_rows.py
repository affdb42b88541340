"""Only the rows that sample: after the last layer's keys and values are written, no other row of a step is needed.

The fused graph is cut in two in front of its last attention. The first part runs on all rows, the second on those that
are wanted: their queries, the values that live across the cut, and plans of one new token for each. That saves most of
a layer of every prefill step.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from samovar.attention.base import AttentionPlan
from samovar.layers.attention import Attention
from samovar.layers.batch import ForwardBatch
from samovar.layers.embedding import Embedding
from samovar.layers.fusions import ROW_WISE, call, caller, given, replace, residual_add
from samovar.layers.layer import Layer
from samovar.layers.layer_norm import AddLayerNorm, LayerNorm
from samovar.layers.linear import Linear, RowLinear
from samovar.layers.mlp import GatedActivation
from samovar.layers.moe import Experts, Router, SharedGate
from samovar.layers.norm import AddRMSNorm, RMSNorm
from samovar.layers.recurrent import Recurrent

ROW_METHODS = (
    Linear.project,
    Linear.project_into,
    RowLinear.forward,
    RMSNorm.normed,
    AddRMSNorm.forward,
    GatedActivation.forward,
    Router.forward,
    Experts.forward,
    Experts.project,
    SharedGate.forward,
)
"""Calls whose results' rows depend on the same rows of what they are given, and on nothing else of the step."""
ROW_FUNCTIONS = (residual_add, operator.add, operator.mul)
SOURCES = (Embedding.forward, Attention.attend, Attention.forward)
"""Calls that give one row for each of the step, whatever they read."""


@dataclass(frozen=True, slots=True)
class LastRows:
    """The two parts of a fused model: `before` gives what lives across the cut, the queries first; `after` takes the
    rows of those that are wanted, and the batch. `width` is that of hidden states."""

    before: Callable[[ForwardBatch], tuple[torch.Tensor, ...]]
    after: Callable[..., torch.Tensor]
    width: int

    def __call__(self, batch: ForwardBatch, rows: torch.Tensor, plans: Sequence[AttentionPlan]) -> torch.Tensor:
        """Hidden states of `rows` (int64, in this order), [rows, hidden]; every row's K/V is written.

        Each of `rows` must be the last of its sequence. `plans` are those of a step in which these sequences have one
        new token each and the same totals; they are not read if there are no rows.
        """
        values = self.before(batch)
        if not len(rows):
            return values[0].new_empty((0, self.width))
        wanted = [value[rows] for value in values]
        del values  # the memory of all other rows
        return self.after(*wanted, _batch_of_rows(batch, rows, plans))


def _batch_of_rows(batch: ForwardBatch, rows: torch.Tensor, plans: Sequence[AttentionPlan]) -> ForwardBatch:
    """The batch as it is for `rows` alone."""
    return dataclasses.replace(
        batch,
        token_ids=batch.token_ids[rows],
        positions=batch.positions[rows],
        slot_mapping=batch.slot_mapping[rows],
        plans=tuple(plans),
        rope_tables={},
    )


def cut_last_rows(graph: Graph) -> LastRows | str:
    """Cut a graph to which the rules of `fusions` were applied, or say why that cannot be done.

    The graph computes the same afterwards.
    """
    cut = _last_attend(graph)
    if cut is None:
        return "it has no attention"
    nodes = list(graph.nodes)
    first = nodes.index(cut)
    before, after = nodes[:first], nodes[first:]
    queries, batch = given(cut)
    rows = _row_nodes(graph)
    for node in after[1:-1]:
        if node not in rows or _has_state(node):
            return f"{node.name} may need all of them"
    used = dict.fromkeys(value for node in after for value in node.all_input_nodes if value < cut)
    live = [queries, *(value for value in used if value not in (queries, batch))]
    for value in live[1:]:
        if value not in rows or any(caller(value, pair.forward) is not None for pair in (AddRMSNorm, AddLayerNorm)):
            return f"{value.name} may have other rows"
    width = _width(after[-1].args[0])
    if width is None:
        return "it does not end in a norm"
    return LastRows(_part_before(before, live), _part_after(after, live, batch), width)


def _last_attend(graph: Graph) -> Node | None:
    """The last attention, taken apart from its write if no rule has done that."""
    for node in reversed(list(graph.nodes)):
        if caller(node, Attention.attend) is not None:
            return node if isinstance(node, Node) else None
        attention = caller(node, Attention.forward)
        if attention is not None:
            q, k, v, batch = given(node)
            call(graph, node, attention.write, k, v, batch)
            attend = call(graph, node, attention.attend, q, batch)
            replace(graph, node, attend)
            return attend
    return None


def _row_nodes(graph: Graph) -> set[Node]:
    """The nodes that have one row for each of the step's, each computed from the same row of others or by attention."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_source = any(caller(node, method) is not None for method in SOURCES)
        is_source |= _has_state(node)
        # What a layer reads of the batch is cut to the rows, too.
        rows_of = [value for value in node.all_input_nodes if value.op != "placeholder" or not _says_so(node)]
        if is_source or (_is_row_wise(node) and all(value in found for value in rows_of)):
            found.add(node)
    return found


def _has_state(node: Node) -> bool:
    """Whether a node calls a layer that goes through all tokens of a sequence."""
    return isinstance(getattr(node.target, "__self__", None), Recurrent)


def _is_row_wise(node: Node) -> bool:
    if node.meta.get(ROW_WISE) or (node.target in ROW_FUNCTIONS and not node.kwargs):
        return True
    if node.target is getitem:
        source = given(node)[0]
        return _says_so(source) or any(
            caller(source, method) is not None for method in (AddRMSNorm.forward, Router.forward)
        )
    return _says_so(node) or any(caller(node, method) is not None for method in ROW_METHODS)


def _says_so(node: Node) -> bool:
    """Whether a node calls a layer that is `is_row_wise`."""
    layer = getattr(node.target, "__self__", None)
    return isinstance(layer, Layer) and layer.is_row_wise and caller(node, type(layer).forward) is not None


def _width(output: Any) -> int | None:
    """How wide the result is, by the norm that it comes from."""
    norm = caller(output, RMSNorm.normed)
    if norm is None and isinstance(output, Node):
        source = given(output)[0] if output.target is getitem else output
        norm = caller(source, AddRMSNorm.forward) or caller(source, AddLayerNorm.forward)
    return norm.dim if isinstance(norm, (RMSNorm, LayerNorm)) else None


def _part_before(nodes: Sequence[Node], live: Sequence[Node]) -> Callable[..., Any]:
    """The part up to the cut; it returns `live`."""
    part, copies = Graph(), dict[Node, Node]()
    for node in nodes:
        copies[node] = part.node_copy(node, copies.__getitem__)
    part.output(tuple(copies[value] for value in live))
    return _function(part, "BeforeLastAttention")


def _part_after(nodes: Sequence[Node], live: Sequence[Node], batch: Node) -> Callable[..., Any]:
    """The part from the cut on; it takes `live` and the batch."""
    part = Graph()
    copies = {value: part.placeholder(value.name) for value in (*live, batch)}
    for node in nodes:
        copies[node] = part.node_copy(node, copies.__getitem__)
    return _function(part, "FromLastAttention")


def _function(graph: Graph, name: str) -> Callable[..., Any]:
    graph.lint()
    return GraphModule(nn.Module(), graph, name).forward
