"""Mixtures of experts: the router, the experts, and what is beside them. Sizes are logical; weights of any format.

`Experts` is as many pairs of linears as there are experts, each composed of a weight format as `Linear` is, whose tensors
lie in one tensor for all experts where they can: plain weights are multiplied by one op for all experts, other formats
expert by expert. A rank holds a share of every expert's width, or with `Placement.ep` whole experts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from samovar.errors import CheckpointError, ConfigError
from samovar.kernels.expert_products import UNGATED, Gate, activated, expert_products
from samovar.kernels.expert_products.torch_sorted import pairs_by_expert, weighted_sum
from samovar.kernels.route import Scoring, route
from samovar.layers.coded_experts import CodedExperts
from samovar.layers.layer import Layer, Placement, Source
from samovar.layers.linear import ColumnLinear, Linear, RowLinear
from samovar.layers.mlp import ACTIVATIONS
from samovar.parallel.mesh import Axis
from samovar.quant.stored import Stored
from samovar.quant.unquantized import Unquantized


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router chooses: the arguments of the op `route`. `bias` is the name of the tensor that only decides who is
    chosen, beside the router's weight; None if there is none."""

    top_k: int
    scoring: Scoring = "softmax"
    renormalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    least: float = 1e-20
    bias: str | None = None


class Router(Linear):
    """Which experts compute a token: weight [experts, hidden], the same on every rank, never quantized."""

    def __init__(self, hidden: int, experts: int, routing: Routing, *, bias: bool = False) -> None:
        super().__init__(hidden, experts, bias=bias)
        self.experts, self.routing = experts, routing
        self.choice_bias: torch.Tensor | None = None

    def bind(self, place: Placement) -> None:
        """Allocate, and choose the kernel."""
        super().bind(dataclasses.replace(place, quant_for=place.table))
        self.route = place.kernels.use(route)
        if self.routing.bias is not None:
            self.choice_bias = place.empty(self.experts, dtype=torch.float32)

    def sources(self) -> list[Source]:
        """The linear's, and the bias of the choice."""
        found = super().sources()
        if self.choice_bias is not None:
            found.append(Source(self.stored(f"{self.path}.{self.routing.bias}"), self.choice_bias))
        return found

    def resident_bytes(self) -> int:
        """See `Layer`."""
        return super().resident_bytes() + (0 if self.choice_bias is None else self.choice_bias.nbytes)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """x [tokens, hidden] -> (weights float32 [tokens, top_k], ids int32 [tokens, top_k])."""
        logits = self.quant.logits(x, self.weights)
        if self.bias is not None:
            logits = logits + self.bias
        r = self.routing
        groups = (r.groups, r.top_groups, r.group_best)
        return self.route(logits, self.choice_bias, r.top_k, r.scoring, r.renormalize, r.scale, *groups, r.least)


@dataclass(frozen=True, slots=True)
class ExpertStorage:
    """How a checkpoint holds experts. By default each expert has linears of its own, `0.gate_proj`, `0.up_proj` and
    `0.down_proj`. `stacked`: `gate_up_proj` and `down_proj` are one tensor each for all experts; `bare`: under names
    without ".weight", and "_bias" behind; `transposed`: inputs before outputs, if plain; `interleaved`: rows of gate
    and up in turns."""

    stacked: bool = False
    bare: bool = False
    transposed: bool = False
    interleaved: bool = False


EACH = ExpertStorage()


class Experts(Layer):
    """The gated networks of a mixture, or plain ones for the activation "relu2". `limit` is that of "clamped"."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        experts: int,
        activation: str = "silu",
        *,
        bias: bool = False,
        limit: float = 0.0,
        storage: ExpertStorage = EACH,
    ) -> None:
        super().__init__()
        self.hidden, self.inner, self.experts, self.has_bias = hidden, inner, experts, bias
        self.limit, self.storage = limit, storage
        if activation not in ("clamped", *UNGATED, *ACTIVATIONS):
            raise CheckpointError(
                f"the activation {activation!r} (hidden_act in config.json) is not supported for experts; "
                f"there are {', '.join(sorted([*ACTIVATIONS, *UNGATED]))}"
            )
        self.kind = cast(Gate, ACTIVATIONS.get(activation, activation))

    def bind(self, place: Placement) -> None:
        """Allocate this rank's experts, or its share of all."""
        self.axis = place.tp if place.ep is None else place.ep
        self.is_split = place.ep is None
        self.local = self.experts if self.is_split else self.axis.share(self.experts, "the number of experts")
        self.first = 0 if self.is_split else self.axis.rank * self.local
        self.products, self.dtype = place.kernels.use(expert_products), place.dtype
        self.target = place.kernels.target.device
        inside = place if self.is_split else dataclasses.replace(place, tp=Axis())
        stacks = list[torch.Tensor]()
        is_plain = isinstance(inside.quant(self.path), Unquantized)
        # Tensors of other formats need not be of one shape; in the checkpoint they are where it has one for all.
        may_stack, count = self.storage.stacked or is_plain, 1 if is_plain else self.local
        places = [_entry(inside, stacks, e, self.local) if may_stack else inside for e in range(count)]
        # In plain lists: their tensors belong to this layer, and a trace sees one call.
        self.pairs = [self._pair(expert, where) for expert, where in enumerate(places)]
        self.stacks = _stacks_of(self.pairs, stacks)
        self.pairs += [self._twin(self.pairs[0], expert) for expert in range(count, self.local)]
        self.gate_up: torch.Tensor | None = None
        self.down: torch.Tensor | None = None
        self.coded: CodedExperts | None = None
        self.coded_tensors: list[torch.Tensor] = []
        """What `coded` holds, for whoever counts or moves a layer's memory."""
        if self._is_plain():
            self._stack()
        elif self._becomes_plain():
            self._check_formats()
            self.coded = CodedExperts.of(self.pairs, place.kernels, self.kind, interleaved=self.storage.interleaved)
            if place.device.type == "meta":
                self._stand_in(place)

    def _pair(self, expert: int, place: Placement) -> tuple[Linear, Linear]:
        """The two linears of a local expert, bound."""
        stored, names = self.storage, ("up_proj",) if self.kind in UNGATED else ("gate_proj", "up_proj")
        parts = dict.fromkeys(names, self.inner)
        up = ColumnLinear(
            self.hidden,
            2 * self.inner if stored.interleaved else parts,  # in turns: any run of rows has as many of both
            bias=self.has_bias,
            stored_fused=stored.stacked,
        )
        down = RowLinear(self.inner, self.hidden, bias=self.has_bias)
        for linear, name in ((up, "gate_up_proj"), (down, "down_proj")):
            linear.path, linear.renames = self._path(expert, name), self.renames
            linear.bind(place)
        return up, down

    def _twin(self, pair: tuple[Linear, Linear], expert: int) -> tuple[Linear, Linear]:
        """What `_pair` would give for plain weights, in a tenth of the time."""
        up, down = (copy.copy(linear) for linear in pair)
        for linear in (up, down):
            linear.path = self._path(expert, linear.path.rpartition(".")[2])
            whole = {name: _through(self.stacks, tensor, self.local) for name, tensor in linear.weights.items()}
            linear.weights = {name: stack[expert] for name, stack in whole.items() if stack is not None}
            linear.bias = linear.weights.get("bias")
        return up, down

    def _path(self, expert: int, name: str) -> str:
        return f"{self.path}.{name}" if self.storage.stacked else f"{self.path}.{self.first + expert}.{name}"

    def _is_plain(self) -> bool:
        return all(isinstance(linear.quant, Unquantized) for pair in self.pairs for linear in pair)

    def _stack(self) -> None:
        """Plain weights of all experts as the op takes them: where they lie."""
        ups, downs = (self._joined(at) for at in range(2))
        self.gate_up, self.gate_up_bias = ups["weight"], ups.get("bias")
        # The partial sums of ranks that share an expert are added up: one of them has the bias.
        is_first = not self.is_split or self.axis.rank == 0
        self.down, self.down_bias = downs["weight"], downs.get("bias") if is_first else None

    def _joined(self, at: int) -> dict[str, torch.Tensor]:
        """The tensors of one of the linears for all experts, of which each expert keeps its view."""
        found = {name: _joined([pair[at].weights[name] for pair in self.pairs]) for name in self.pairs[0][at].weights}
        for expert, pair in enumerate(self.pairs):
            pair[at].weights = {name: stack[expert] for name, stack in found.items()}
            pair[at].bias = pair[at].weights.get("bias")
        return found

    def sources(self) -> list[Source]:
        """The linears', or those of one for all."""
        if not self.storage.stacked:
            return [source for pair in self.pairs for linear in pair for source in linear.sources()]
        return [source for at in range(2) for source in self._stacked_sources(at)]

    def _stacked_sources(self, at: int) -> list[Source]:
        """Copies out of tensors that hold all experts: in one piece each if they lie so here, else expert by expert."""
        linear, found = self.pairs[0][at], []
        for number, source in enumerate(linear.sources()):
            name, spec = self._name_of_all(source), source.name.rpartition(".")[2]
            axis = None if source.axis is None else source.axis + 1
            whole = _through(self.stacks, source.target, self.local)
            if whole is not None:
                split = (axis, source.shard) if self.is_split else (0, (self.axis.rank, self.axis.size))
                found.append(self._turned(Source(name, whole, *(split if split[1][1] > 1 else (None, (0, 1)))), spec))
                continue
            if axis is not None:
                raise ConfigError(f"{name} is not kept in one piece and cannot be split: use --tensor-parallel-size 1")
            for expert, pair in enumerate(self.pairs):
                target = pair[at].sources()[number].target[None]
                found.append(self._turned(Source(name, target, 0, (self.first + expert, self.experts)), spec))
        return found

    def _name_of_all(self, source: Source) -> str:
        """What a tensor of all experts is called that one expert's linear would read as `source`."""
        if not self.storage.bare:
            return source.name
        name, spec = source.name.rpartition(".")[::2]
        tail = spec.removeprefix("weight")
        return f"{name}{tail if tail == '' or tail.startswith('_') else '_' + tail}"

    def _turned(self, source: Source, spec: str) -> Source:
        """`source` for a checkpoint that has inputs before outputs."""
        if not self.storage.transposed or spec != "weight":
            return source
        axis = None if source.axis is None else (0, 2, 1)[source.axis]
        return dataclasses.replace(source, target=source.target.transpose(1, 2), axis=axis)

    def claims(self) -> set[str]:
        """The names of all experts, wherever they are."""
        if self.storage.stacked:
            return {self._name_of_all(source) for linear in self.pairs[0] for source in linear.sources()}
        names = {source.name for source in self.sources()}
        if self.is_split:
            return names
        for linear in self.pairs[0]:
            kept = linear.path
            for expert in range(-self.first, self.experts - self.first):
                linear.path = self._path(expert, kept.rpartition(".")[2])
                names |= {source.name for source in linear.sources()}
            linear.path = kept
        return names

    def unread(self) -> set[str]:
        """See `Layer`."""
        return set() if self.storage.stacked else set().union(*(each.unread() for pair in self.pairs for each in pair))

    def zeros(self) -> set[str]:
        """See `Layer`."""
        return set() if self.storage.stacked else set().union(*(each.zeros() for pair in self.pairs for each in pair))

    def resident_bytes(self) -> int:
        """See `Layer`."""
        if self.coded is not None:
            return self.coded.num_bytes(self.pairs, self.pairs[0][0].quant.kernels)
        if self._becomes_plain():
            sizes = sum(sum(up.rows) * self.hidden + self.hidden * down.num_inputs for up, down in self.pairs)
            biases = sum(linear.bias.nbytes for pair in self.pairs for linear in pair if linear.bias is not None)
            return sizes * self.dtype.itemsize + biases
        return sum(linear.resident_bytes() for pair in self.pairs for linear in pair)

    def _becomes_plain(self) -> bool:
        """Formats that have no kernel for experts on this device are dequantized once, after loading, unless `coded`."""
        return self.target != "cpu" or self._is_plain()

    def after_load(self) -> None:
        """Let the formats repack."""
        if not self._is_plain():
            self.stacks = []
        if self.coded is not None:
            if self.coded.fill(self.pairs, has_down_bias=not self.is_split or self.axis.rank == 0):
                self.coded_tensors = self.coded.tensors()
                return
            self.coded = None
        for pair in self.pairs:
            for linear in pair:
                if isinstance(linear.quant, Stored) and self._becomes_plain():
                    linear.quant.coded_products = None
                linear.after_load()
        if not self._is_plain() and self._becomes_plain():
            self._dequantize()
        if self._is_plain():
            self._stack()

    def _check_formats(self) -> None:
        for method in {type(linear.quant) for pair in self.pairs for linear in pair}:
            if not issubclass(method, (Stored, Unquantized)):
                raise ConfigError(
                    f"{self.path}: experts of the format {method.__name__} cannot be multiplied on this device yet: "
                    "leave --quantization away, or use --device cpu"
                )

    def _stand_in(self, place: Placement) -> None:
        """What `after_load` will make, without memory: kernels are prepared with it."""
        up, down = self.pairs[0]
        if self.coded is not None:
            self.coded.stand_in(self.pairs, up.quant.kernels)
            return
        rows, outputs = sum(up.rows), sum(down.rows)
        self.gate_up = place.empty(self.local, rows, up.num_inputs)
        self.down = place.empty(self.local, outputs, down.num_inputs)
        self.gate_up_bias = None if up.bias is None else place.empty(self.local, rows)
        self.down_bias = None if down.bias is None else place.empty(self.local, outputs)

    def _dequantize(self) -> None:
        """Make plain what is not, of which `_check_formats` said that it can be done."""
        for linear in (linear for pair in self.pairs for linear in pair):
            method = linear.quant
            if not isinstance(method, Stored):
                continue
            weight = method.dequantize(linear.weights).to(self.dtype)
            linear.weights = {"weight": weight} if linear.bias is None else {"weight": weight, "bias": linear.bias}
            linear.quant = Unquantized(self.dtype, method.kernels)

    def forward(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, beside: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [tokens, hidden] and what the router gave -> [tokens, hidden], added to `beside` if that is given."""
        if self.axis.size == 1:
            return self.project(x, weights, ids, beside)
        y = self.axis.all_reduce(self.project(x, weights, ids))
        return y if beside is None else y + beside

    def project(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`forward` without what other ranks add, plus `residual` [tokens, hidden]."""
        if self.coded is not None:
            return self.coded(x, ids, weights, self.kind, self.limit, self.first, residual)
        if self.gate_up is None or self.down is None:
            return self._one_by_one(x, weights, ids, residual)
        biases = (self.gate_up_bias, self.down_bias)
        rest = (self.kind, *biases, self.storage.interleaved, self.limit, self.first, residual)
        return self.products(x, ids, weights, self.gate_up, self.down, *rest)

    def _one_by_one(
        self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """Every expert that has tokens by its own format."""
        k, results = ids.shape[1], x.new_zeros(ids.numel(), self.hidden)
        for expert, pairs in pairs_by_expert(ids, self.first, self.local):
            up, down = self.pairs[expert]
            h = activated(up.project(x[pairs // k]), self.kind, self.storage.interleaved, self.limit)
            bias = None if self.is_split and self.axis.rank > 0 else down.bias
            results[pairs] = down.quant.multiply(h.to(x.dtype), down.weights, bias)
        return weighted_sum(results, weights, residual)


class SharedGate(Linear):
    """y * sigmoid(x W^T): how much the shared expert counts for a token."""

    def __init__(self, hidden: int) -> None:
        super().__init__(hidden, 1)

    def bind(self, place: Placement) -> None:
        """Allocate; never quantized."""
        super().bind(dataclasses.replace(place, quant_for=place.table))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x, y [tokens, hidden] -> [tokens, hidden]."""
        share: torch.Tensor = torch.sigmoid(self.quant.logits(x, self.weights))
        return (share * y).to(y.dtype)


class SparseMLP(nn.Module):
    """Router, experts, and beside them a network for every token, if there is one, gated or not."""

    def __init__(
        self, gate: Router, experts: Experts, shared: nn.Module | None = None, shared_gate: SharedGate | None = None
    ) -> None:
        super().__init__()
        self.gate, self.experts, self.shared_experts, self.shared_expert_gate = gate, experts, shared, shared_gate

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, hidden] -> [tokens, hidden]."""
        weights, ids = self.gate(x)
        if self.shared_experts is None:
            y: torch.Tensor = self.experts(x, weights, ids)
            return y
        shared = self.shared_experts(x)
        if self.shared_expert_gate is not None:
            shared = self.shared_expert_gate(x, shared)
        y = self.experts(x, weights, ids, shared)
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry(Placement):
    """A placement whose tensors are entries of tensors for all experts; those of the first expert make them."""

    stacks: list[torch.Tensor]
    expert: int
    count: int
    taken: list[int]

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `Placement`."""
        at, wanted = len(self.taken), dtype or self.dtype
        self.taken.append(at)
        if self.expert == 0:
            self.stacks.append(Placement.empty(self, self.count, *shape, dtype=dtype))
        if at < len(self.stacks) and self.stacks[at].shape[1:] == shape and self.stacks[at].dtype == wanted:
            return self.stacks[at][self.expert]
        return Placement.empty(self, *shape, dtype=dtype)


def _entry(place: Placement, stacks: list[torch.Tensor], expert: int, count: int) -> _Entry:
    known = {field.name: getattr(place, field.name) for field in dataclasses.fields(Placement)}
    return _Entry(**known, stacks=stacks, expert=expert, count=count, taken=[])


def _stacks_of(pairs: Sequence[tuple[Linear, Linear]], stacks: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those of `stacks` that hold the weights: a format may have taken other memory."""
    used = {_place(tensor) for linear in pairs[0] for tensor in linear.weights.values()}
    return [stack for stack in stacks if _place(stack) in used]


def _place(tensor: torch.Tensor) -> int:
    """What tells storages apart, those without memory included."""
    place: int = tensor.untyped_storage()._cdata
    return place


def _through(stacks: Sequence[torch.Tensor], target: torch.Tensor, count: int) -> torch.Tensor | None:
    """The same view as `target`, one of the first expert, for all experts; None if they lie apart."""
    for stack in stacks:
        if _place(stack) == _place(target):
            sizes, strides = (count, *target.shape), (stack.stride(0), *target.stride())
            return stack.as_strided(sizes, strides, target.storage_offset())
    return None


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """[experts, ...] out of one tensor each: without a copy if they lie one behind the other."""
    first, size = tensors[0], tensors[0].numel()
    if all(
        _place(each) == _place(first) and each.storage_offset() == first.storage_offset() + i * size
        for i, each in enumerate(tensors)
    ):
        return first.as_strided((len(tensors), *first.shape), (size, *first.stride()), first.storage_offset())
    return torch.stack(tensors)
