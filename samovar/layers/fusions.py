"""The rules of `fuse`: what may be joined, each a small function over the graph of layer calls.

A rule looks at one node. It answers None if the node is not of its kind, False if what it joins does not stand around
the node, and True after joining it. A joined call stands where the last of its parts stood, so rules that move a read of
the residual stream over a write to it must look out for that; everything else in the graph is written once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import getitem
from types import MethodType
from typing import Any

import torch
from torch.fx import Graph, Node

from samovar.kernels.op import Kernels
from samovar.kernels.rope_write_kv import rope_write_kv
from samovar.layers.attention import Attention
from samovar.layers.batch import ForwardBatch
from samovar.layers.embedding import Embedding
from samovar.layers.linear import Linear, QKVLinear
from samovar.layers.mlp import GatedActivation
from samovar.layers.moe import Experts
from samovar.layers.norm import AddRMSNorm, RMSNorm
from samovar.layers.rope import Rope

ROW_WISE = "row_wise"
"""In `Node.meta` of joined calls: a row of the result depends on the same row of the arguments only."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of fusion; `anchors` names the calls it looks at, in the plural."""

    name: str
    anchors: str
    apply: Callable[[Graph, Node, Kernels], bool | None]


def residual_add(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """The add of an `AddRMSNorm` that was taken apart."""
    return x + residual


def call(graph: Graph, before: Node, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """A new node that calls `function`."""
    with graph.inserting_before(before):
        return graph.call_function(function, args, kwargs)


def replace(graph: Graph, node: Node, other: Node) -> None:
    """Let `other` take the place of `node`, and remove what only `node` needed."""
    node.replace_all_uses_with(other)
    _discard(graph, node)


def _discard(graph: Graph, node: Node) -> None:
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for needed in inputs:
        if not needed.users and needed.op != "placeholder":
            _discard(graph, needed)


def given(node: Node) -> tuple[Any, ...]:
    """The positional arguments of a call: nodes, and constants."""
    return node.args


def caller(node: Any, method: Callable[..., Any]) -> Any:
    """The layer whose `method` this node calls with one plain argument list; None if it calls something else."""
    target = node.target if isinstance(node, Node) and not node.kwargs else None
    return target.__self__ if isinstance(target, MethodType) and target.__func__ is method else None


def _row_wise(node: Node) -> Node:
    node.meta[ROW_WISE] = True
    return node


def whole(*items: Any) -> Node | None:
    """The call whose results, all of them and in order, are `items`, each used once."""
    source = items[0].args[0] if isinstance(items[0], Node) and items[0].target is getitem else None
    for index, item in enumerate(items):
        if not isinstance(item, Node) or item.target is not getitem:
            return None
        if item.args != (source, index) or len(item.users) != 1:
            return None
    return source if isinstance(source, Node) and len(source.users) == len(items) else None


def _join_rope_write_kv(graph: Graph, node: Node, kernels: Kernels) -> bool | None:
    """q, k, v -> norms of q and k, if any -> rope -> write; then attend."""
    attention = caller(node, Attention.forward)
    if attention is None:
        return None
    q, k, v, batch = given(node)
    turned = whole(q, k)
    rope = caller(turned, Rope.forward)
    if turned is None or rope is None or given(turned)[2] is not batch:
        return False
    heads = list(given(turned)[:2])
    norms = [caller(x, RMSNorm.normed) for x in heads]
    if all(norms) and norms[0].eps == norms[1].eps and all(len(x.users) == 1 for x in heads):
        heads = [x.args[0] for x in heads]
    split = whole(*heads, v)
    qkv = caller(split, QKVLinear.heads_of)
    if split is None or qkv is None or not qkv.has_values or qkv.sorts_results or attention.packed is not None:
        return False
    joined = _rope_write_kv_call(qkv, norms, rope, attention, kernels.use(rope_write_kv))
    q = call(graph, node, joined, *given(split), batch)
    replace(graph, node, call(graph, node, attention.attend, q, batch))
    return True


def _rope_write_kv_call(
    qkv: QKVLinear,
    norms: list[RMSNorm | None],
    rope: Rope,
    attention: Attention,
    write: Callable[..., torch.Tensor],
) -> Callable[[torch.Tensor, ForwardBatch], torch.Tensor]:
    heads, width, dim = qkv.split_heads[0], sum(qkv.split_heads), qkv.head_dim
    q_norm, k_norm = norms
    eps = 0.0 if q_norm is None else q_norm.eps

    def rope_and_write(y: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        return write(
            y.view(-1, width, dim),
            *rope.table(batch),
            *attention.cache[:2],
            batch.slot_mapping,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            eps,
            heads,
            *attention.cache[2:],
        )

    return rope_and_write


def _join_linear_add(graph: Graph, node: Node, kernels: Kernels) -> bool | None:
    """residual + linear(x), where nothing reads the old residual afterwards: added in place."""
    if node.target is not residual_add:
        return None
    y, residual = given(node)
    linear = caller(y, Linear.project)
    if linear is None or len(y.users) != 1 or not _may_write(residual, node):
        return False
    replace(graph, node, call(graph, node, linear.project_into, y.args[0], residual))
    return True


def _join_experts_add(graph: Graph, node: Node, kernels: Kernels) -> bool | None:
    """residual + experts(x): the sum over experts begins anew, so the old residual may be read afterwards."""
    if node.target is not residual_add:
        return None
    y, residual = given(node)
    experts = caller(y, Experts.forward)
    if experts is None:
        return None
    if len(y.users) != 1 or len(y.args) != 3 or experts.axis.size > 1:
        return False
    replace(graph, node, call(graph, node, experts.project, *y.args, residual))
    return True


def _may_write(residual: Node, at: Node) -> bool:
    """Whether `residual` is memory of its own, and read before `at` only, by calls that keep no view of it."""
    is_own = residual.target is residual_add or any(
        caller(residual, method) for method in (Embedding.forward, Linear.project_into, Experts.project)
    )
    readers = [user for user in residual.users if user is not at]
    return is_own and all(caller(user, RMSNorm.normed) is not None and user < at for user in readers)


def _normed_stream(linear: Node, at: Node) -> tuple[RMSNorm, Node] | None:
    """The norm in front of `linear` and what it norms, if only `linear` needs the norm and it may be computed at `at`."""
    normed = given(linear)[0]
    norm = caller(normed, RMSNorm.normed)
    if norm is None or len(normed.users) != 1:
        return None
    stream = normed.args[0]
    writes = [user for user in stream.users if caller(user, Linear.project_into) is not None]
    return (norm, stream) if all(at < write for write in writes) else None


def _join_norm_gated_linear(graph: Graph, node: Node, kernels: Kernels) -> bool | None:
    """norm -> gate and up -> gated activation."""
    activation = caller(node, GatedActivation.forward)
    if activation is None:
        return None
    gate_up = given(node)[0]
    linear = caller(gate_up, Linear.project)
    found = _normed_stream(gate_up, node) if linear is not None and len(gate_up.users) == 1 else None
    if found is None:
        return False
    norm, stream = found
    kind = activation.kind

    def norm_gated_linear(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = linear.quant.norm_gated_multiply(x, norm.weight, norm.eps, linear.weights, kind, linear.bias)
        return y

    replace(graph, node, _row_wise(call(graph, node, norm_gated_linear, stream)))
    return True


def _join_norm_linear(graph: Graph, node: Node, kernels: Kernels) -> bool | None:
    """norm -> linear. A stream that is still to be added up is left: add and norm are one kernel already."""
    linear = caller(node, Linear.project)
    if linear is None:
        return None
    found = _normed_stream(node, node)
    if found is None or found[1].target is residual_add:
        return False
    norm, stream = found

    def norm_linear(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = linear.quant.norm_multiply(x, norm.weight, norm.eps, linear.weights, linear.bias)
        return y

    replace(graph, node, _row_wise(call(graph, node, norm_linear, stream)))
    return True


def _join_add_rms_norm(graph: Graph, node: Node, kernels: Kernels) -> bool | None:
    """What no other rule took: an `AddRMSNorm` is put together again."""
    norm = caller(node, RMSNorm.normed)
    total = given(node)[0] if isinstance(norm, AddRMSNorm) else None
    if norm is None or total is None or total.target is not residual_add:
        return None
    pair = call(graph, total, norm.forward, *total.args)
    normed, summed = (call(graph, total, getitem, pair, index) for index in range(2))
    replace(graph, total, summed)
    replace(graph, node, normed)
    return True


RULES = (
    Rule("rope_write_kv", "attention layers", _join_rope_write_kv),
    Rule("experts_add", "adds of experts", _join_experts_add),
    Rule("linear_add", "residual adds", _join_linear_add),
    Rule("norm_gated_linear", "gated activations", _join_norm_gated_linear),
    Rule("norm_linear", "other linears", _join_norm_linear),
    Rule("add_rms_norm", "other adds with a norm", _join_add_rms_norm),
)
"""In the order in which they are applied to the whole graph."""
