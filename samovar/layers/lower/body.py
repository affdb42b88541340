"""lower: the calls of a bound model's layers -> instructions, or the reason why that cannot be done.

One walk over the smallest calls (`fuse.trace_calls`). A norm in front of a single linear becomes part of it, a linear
behind which its result is added to a stream is added in place, and everything between the projection of q, k and v and
attention is one instruction on the projection's own memory. Weights, caches and sizes are read when an operand's address
is asked for, so a lowered model survives loading and another cache, but not another `bind`.
"""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from samovar.layers.attention import Attention, attention_layers
from samovar.layers.embedding import Embedding, Table
from samovar.layers.fuse import trace_calls
from samovar.layers.fusions import caller, given, residual_add, whole
from samovar.layers.linear import Linear, QKVLinear
from samovar.layers.lower.program import Address, Instruction, Program, Value
from samovar.layers.mlp import GatedActivation
from samovar.layers.norm import HeadsRMSNorm, RMSNorm
from samovar.layers.rope import Rope
from samovar.native.abi import Count, Format, Op
from samovar.quant.packed import Packed

ACTIVATION_CODES = {"silu": 0, "gelu": 1}
ADDS = (residual_add, operator.add)
CACHE_FORMATS = {
    torch.float32: Format.F32,
    torch.float16: Format.F16,
    torch.bfloat16: Format.BF16,
    torch.float8_e4m3fn: Format.KV_FP8_E4M3,
    torch.int8: Format.KV_I8,
}
HEAD_STEP, LARGEST_HEAD = 8, 256
"""Heads that the library's attention takes: multiples of the one, up to the other."""


class CannotLower(Exception):
    """Some call has no instruction; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Body:
    """The instructions from token ids to the stream in front of the final norm.

    `last` computes, from the last attention on, only rows that are wanted: `stream` has one row for each there.
    """

    every: Program
    last: Program
    stream: Value
    last_stream: Value
    final_norm: RMSNorm

    @property
    def hidden_size(self) -> int:
        """Width of the stream."""
        return self.stream.width


def lower(model: nn.Module) -> Body:
    """The instructions of `model`, which must be bound with weights for the CPU library; raises `CannotLower`."""
    for layer in attention_layers(model):
        if layer.call.latent is not None:
            raise CannotLower(f"{layer.path} attends over latent rows")
    graph = trace_calls(model)
    if isinstance(graph, str):
        raise CannotLower(graph)
    return _Walk(graph).body()


class _Walk:
    """The state of one walk: what each node's result is, and which nodes a later one takes care of."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = list(graph.nodes)
        self.at = {node: number for number, node in enumerate(self.nodes)}
        self.values: dict[Node, Value] = {}
        self.done: set[Node] = set()
        self.instructions: list[Instruction] = []
        self.tables: dict[object, tuple[Value, Value]] = {}
        self.final: tuple[RMSNorm, Value] | None = None

    def body(self) -> Body:
        """Walk, and cut what was found in front of the last attention."""
        for node in self.nodes:
            self._visit(node)
        for node in self.nodes:
            if node not in self.done:
                raise CannotLower(f"{_words(node)} has no instruction")
        if self.final is None:
            raise CannotLower("the model does not end in a norm")
        norm, stream = self.final
        every = Program(tuple(self.instructions))
        last, last_stream = _last_rows(every, stream)
        return Body(every, last, stream, last_stream, norm)

    def _visit(self, node: Node) -> None:
        kinds: tuple[tuple[Callable[..., Any], Callable[[Node, Any], None]], ...] = (
            (Embedding.forward, self._embed),
            (Linear.project, self._project),
            (RMSNorm.normed, self._norm),
            (Attention.forward, self._attend),
            (GatedActivation.forward, self._gate),
        )
        if node.op == "placeholder" or node.target is getattr:
            self.done.add(node)
        elif node.op == "output":
            self._finish(node)
        elif node.target in ADDS and len(node.args) == 2 and not node.kwargs:
            self._add(node)
        else:
            for method, visit in kinds:
                layer = caller(node, method)
                if layer is not None:
                    visit(node, layer)

    def _emit(self, node: Node, value: Value, instruction: Instruction, *taken: Node) -> None:
        """`instruction` gives `node`'s `value` and makes the nodes `taken` superfluous."""
        self.instructions.append(instruction)
        self.values[node] = value
        self.done.update((node, *taken))

    def _value(self, node: Any) -> Value:
        if not isinstance(node, Node) or node not in self.values:
            raise CannotLower(f"{_words(node)} is not the rows of an instruction")
        return self.values[node]

    def _embed(self, node: Node, layer: Embedding) -> None:
        ids = given(node)[0]
        if not (isinstance(ids, Node) and ids.target is getattr and ids.args[1] == "token_ids"):
            raise CannotLower(f"{layer.path} looks up {_words(ids)} and not the step's token ids")
        value, factor = Value(layer.dim), 1.0 if layer.factor is None else layer.factor
        self._emit(node, value, Instruction(Op.EMBED, (), (value,), f=(factor,), p=(matrices_of(layer),)))

    def _norm(self, node: Node, layer: RMSNorm) -> None:
        source = given(node)[0]
        if self._is_folded(node) or source not in self.values:
            return  # Its linear, or its attention, takes care of it.
        if _is_output_only(node):
            self.final = (layer, self._value(source))
            self.done.add(node)
            return
        x, value = self._value(source), Value(layer.dim)
        _check_width(layer, x)
        self._emit(node, value, norm_instruction(layer, x, value))

    def _is_folded(self, node: Node) -> bool:
        """Whether the norm has one reader, a linear, that can do it."""
        users = list(node.users)
        return len(users) == 1 and caller(users[0], Linear.project) is not None

    def _project(self, node: Node, layer: Linear) -> None:
        users = list(node.users)
        if len(users) == 1 and (self._added(users[0]) or (None,))[0] is node:
            return
        if len(users) == 1 and caller(users[0], GatedActivation.forward) is not None and _is_pair(layer):
            return
        self._linear(node, node, layer, None)

    def _linear(self, node: Node, project: Node, layer: Linear, stream: Value | None) -> None:
        """The product of `project`, as the value of `node`: added to `stream`, if there is one."""
        instruction_x, norm, taken = self._input(project)
        value = stream or Value(sum(layer.rows))
        p = (matrices_of(layer), _bias(layer), None if norm is None else weight_of(norm))
        i = (len(layer.rows), int(stream is not None), layer.num_inputs, int(norm is not None))
        instruction = Instruction(
            Op.LINEAR, (instruction_x,), (value,), i=i, f=(0.0 if norm is None else norm.eps,), p=p,
            adds=stream is not None,
        )  # fmt: skip
        self._emit(node, value, instruction, project, *taken)

    def _input(self, project: Node) -> tuple[Value, RMSNorm | None, tuple[Node, ...]]:
        """(what the linear reads, the norm it does first, the nodes that this makes superfluous)."""
        source = given(project)[0]
        norm = caller(source, RMSNorm.normed)
        if norm is None or source in self.values or not self._is_folded(source):
            return self._value(source), None, ()
        x = self._value(given(source)[0])
        _check_width(norm, x)
        return x, norm, (source,)

    def _gate(self, node: Node, layer: GatedActivation) -> None:
        source, kind = given(node)[0], ACTIVATION_CODES[layer.kind]
        linear = caller(source, Linear.project)
        if linear is None or source in self.values:
            x = self._value(source)
            value = Value(x.width // 2)
            self._emit(node, value, Instruction(Op.GATED, (x,), (value,), i=(value.width, 0, 0, 0, kind)))
            return
        x, norm, taken = self._input(source)
        value = Value(linear.rows[0])
        instruction = Instruction(
            Op.GATED_LINEAR,
            (x,),
            (value,),
            i=(2, 0, linear.num_inputs, int(norm is not None), kind),
            f=(0.0 if norm is None else norm.eps,),
            p=(
                matrices_of(linear),
                _bias(linear),
                None if norm is None else weight_of(norm),
            ),
        )
        self._emit(node, value, instruction, source, *taken)

    def _added(self, node: Node) -> tuple[Node, Node] | None:
        """(linear, stream) if `node` adds a linear's result to a stream that nobody reads afterwards."""
        if node.target not in ADDS or len(node.args) != 2 or node.kwargs:
            return None
        for project, stream in (node.args, node.args[::-1]):
            linear = caller(project, Linear.project)
            if linear is None or not isinstance(stream, Node) or project is stream:
                continue
            is_only = len(project.users) == 1 and self._is_over(stream, node)  # type: ignore[union-attr]
            if is_only and caller(stream, Linear.project) is None:
                return project, stream  # type: ignore[return-value]
        return None

    def _is_over(self, stream: Node, node: Node) -> bool:
        """Whether nobody reads `stream` at `node` or later, `node` apart."""
        return all(self._last_read(user) < self.at[node] for user in stream.users if user is not node)

    def _last_read(self, user: Node) -> int:
        """When the instruction of `user` runs: norms, and linears that are part of something, later than they stand."""
        postponed = caller(user, RMSNorm.normed) is not None or caller(user, Linear.project) is not None
        if not postponed or not user.users:
            return self.at[user]
        return max(self._last_read(later) for later in user.users)

    def _add(self, node: Node) -> None:
        added = self._added(node)
        if added is not None:
            project, stream = added
            self._linear(node, project, caller(project, Linear.project), self._value(stream))
            return
        a, b = (self._value(term) for term in node.args)
        if a.width != b.width:
            raise CannotLower(f"{_words(node)} adds {a.width} and {b.width} columns")
        free = [
            value
            for term, value in zip(node.args, (a, b), strict=True)
            if isinstance(term, Node) and value.parent is None and self._is_over(term, node)
        ]
        value = free[0] if free else Value(a.width)
        self._emit(node, value, Instruction(Op.ADD, (a, b), (value,), i=(a.width,)))

    def _attend(self, node: Node, attention: Attention) -> None:
        q, k, v, _ = given(node)
        turned = whole(q, k)
        rope = caller(turned, Rope.forward)
        heads = [q, k] if turned is None or rope is None else list(given(turned)[:2])
        norms = [caller(x, RMSNorm.normed) or caller(x, HeadsRMSNorm.forward) for x in heads]
        normed = [x for x, norm in zip(heads, norms, strict=True) if norm is not None]
        split = whole(*(x if norm is None else x.args[0] for x, norm in zip(heads, norms, strict=True)), v)
        qkv = caller(split, QKVLinear.heads_of)
        if split is None or qkv is None or any(len(x.users) != 1 for x in normed):
            raise CannotLower(f"{attention.path} does not get its q, k and v from one projection in a known way")
        if qkv.sorts_results or not qkv.has_values:
            raise CannotLower(f"{qkv.path} sorts its results, or has keys that are values")
        x = self._value(given(split)[0])
        taken = {split, *normed, *split.users}
        if turned is not None and rope is not None:
            taken |= {turned, *turned.users}
        p = [_cache(attention, 0), _cache(attention, 1), *self._head_norms(x, qkv, norms)]
        eps = next((norm.eps for norm, weight in zip(norms, p[2:], strict=True) if weight is not None), 0.0)
        cos, sin = (None, None) if rope is None else self._rope_table(rope)
        turning = 0 if rope is None else 2 * len(rope.per_position)
        sizes = (attention.local_heads, attention.local_kv_heads, attention.head_dim)
        if sizes[2] % HEAD_STEP or sizes[2] > LARGEST_HEAD:
            raise CannotLower(
                f"{attention.path} has heads of {sizes[2]}, not a multiple of {HEAD_STEP} up to {LARGEST_HEAD}"
            )
        if attention.call.chunk is not None:
            raise CannotLower(f"{attention.path} attends in chunks")
        code = cache_format(attention)
        i = (*sizes, turning, code)
        self.instructions.append(Instruction(Op.ROPE_WRITE, (x, cos, sin), (x,), i=i, f=(eps,), p=tuple(p)))
        call, sinks = attention.call, None if attention.sinks is None else _vector(lambda: attention.sinks)
        value = Value(attention.local_heads * attention.head_dim)
        instruction = Instruction(
            Op.ATTENTION,
            (x,),
            (value,),
            i=(*sizes, 0, code, call.window or 0, 0),
            f=(call.scale, call.softcap or 0.0),
            p=(p[0], p[1], sinks),
        )
        self._emit(node, value, instruction, *taken)

    def _head_norms(self, x: Value, qkv: QKVLinear, norms: Sequence[RMSNorm | None]) -> list[Address | None]:
        """The weights of norms that are done with rope; others, done before, become instructions of their own."""
        if not any(norm is not None for norm in norms):
            return [None, None]
        dim = qkv.head_dim
        q, k = norms
        if q is not None and k is not None and q.dim == k.dim == dim and q.eps == k.eps:
            if not isinstance(q, HeadsRMSNorm) and not isinstance(k, HeadsRMSNorm):
                return [weight_of(q), weight_of(k)]
        column = 0
        for norm, heads in zip(norms, qkv.split_heads, strict=False):
            view = Value(heads * dim, x, column)
            column += view.width
            if norm is not None:
                self.instructions.append(norm_instruction(norm, view, view))
        return [None, None]

    def _rope_table(self, rope: Rope) -> tuple[Value, Value]:
        """This step's cos and sin, made before the first layer that needs them."""
        if rope.key not in self.tables:
            cos, sin = Value(len(rope.per_position)), Value(len(rope.per_position))
            instruction = Instruction(
                Op.ROPE_TABLE,
                (),
                (cos, sin),
                i=(0, 0, 0, 2 * cos.width),
                f=(rope.key.magnitude,),
                p=(_vector(lambda: rope.per_position),),
            )
            self.instructions.append(instruction)
            self.tables[rope.key] = cos, sin
        return self.tables[rope.key]

    def _finish(self, node: Node) -> None:
        if self.final is None:
            raise CannotLower(f"the model returns {_words(node.args[0])}, which is not a norm of rows")
        self.done.add(node)


def _last_rows(every: Program, stream: Value) -> tuple[Program, Value]:
    """`every` with only wanted rows from the last attention on, and the stream there."""
    instructions = every.instructions
    cut = max((n for n, instruction in enumerate(instructions) if instruction.op == Op.ATTENTION), default=None)
    if cut is None:
        raise CannotLower("the model has no attention")
    attend, after = instructions[cut], instructions[cut + 1 :]
    made = {value for instruction in instructions[:cut] for value in instruction.values()}
    used = dict.fromkeys(value for instruction in after for value in instruction.values())
    others = {value: Value(value.width) for value in used if value in made}
    gathers = [
        Instruction(Op.GATHER_ROWS, (value,), (other,), i=(value.width,), rows=Count.ROWS)
        for value, other in others.items()
    ]
    i = (*attend.i[:6], 1)
    only_last = Instruction(attend.op, attend.inputs, attend.outputs, i, attend.f, attend.p, rows=Count.ROWS)
    rest = [instruction.replaced(others, Count.ROWS) for instruction in after]
    return Program((*instructions[:cut], only_last, *gathers, *rest)), others.get(stream, stream)


def matrices_of(layer: Linear | Table) -> Address:
    """Where the packed matrices of a layer are described."""
    _packed(layer)
    return lambda: ctypes.addressof(_packed(layer).matrices)


def cache_format(attention: Attention) -> Format:
    """How the layer's keys and values are stored."""
    form = CACHE_FORMATS.get(attention.cache_dtype)
    if form is None or attention.packed is not None:
        raise CannotLower(f"{attention.path} caches {attention.packed or attention.cache_dtype}")
    if attention.cache_scales:
        raise CannotLower(f"{attention.path} has scales for its cache")
    return form


def norm_instruction(norm: RMSNorm, x: Value, y: Value, rows: Count = Count.TOKENS) -> Instruction:
    """The norm of x, all of it or each of its segments."""
    width = norm.local if isinstance(norm, HeadsRMSNorm) else norm.dim
    return Instruction(
        Op.RMS_NORM, (x,), (y,), i=(width, x.width // width, 1), f=(norm.eps,), p=(weight_of(norm),), rows=rows
    )


def _check_width(norm: RMSNorm, x: Value) -> None:
    if norm.dim != x.width:
        raise CannotLower(f"{norm.path} norms {norm.dim} of {x.width} columns")


def _packed(layer: Linear | Table) -> Packed:
    quant = layer.quant
    if not isinstance(quant, Packed):
        raise CannotLower(f"{layer.path} has weights of another kind ({quant.note or type(quant).__name__})")
    return quant


def _is_pair(layer: Linear) -> bool:
    """Whether its parts are a gate and what it gates."""
    return len(layer.rows) == 2 and layer.rows[0] == layer.rows[1]


def _is_output_only(node: Node) -> bool:
    return all(user.op == "output" for user in node.users)


def _cache(attention: Attention, which: int) -> Address:
    def address() -> int:
        return attention.cache[which].data_ptr()

    return address


def weight_of(norm: RMSNorm) -> Address:
    """Where the weight of a norm is."""
    return _vector(lambda: norm.weight)


def _bias(layer: Linear) -> Address | None:
    return _vector(lambda: layer.bias) if layer.has_bias else None


def _vector(read: Callable[[], torch.Tensor | None]) -> Address:
    """The address of a float32 vector that a layer owns."""

    def address() -> int:
        vector = read()
        assert vector is not None and vector.dtype is torch.float32 and vector.is_contiguous(), "not a float32 vector"
        return vector.data_ptr()

    return address


def _words(node: Any) -> str:
    """A node for people."""
    if not isinstance(node, Node):
        return repr(node)
    if node.target is operator.getitem:
        return _words(node.args[0])
    layer = getattr(node.target, "__self__", None)
    path = getattr(layer, "path", "")
    return f"{path} ({type(layer).__name__})" if path else f"{node.name}"
