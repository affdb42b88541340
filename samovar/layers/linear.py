"""The linears. Each composes a weight format; none knows one. Sizes are logical: a rank's share is cut in `bind`."""

from __future__ import annotations

from math import gcd

import torch

from samovar.layers.layer import Layer, Placement, Source
from samovar.layers.norm import head_shard
from samovar.quant.base import Dim, FeatureAxis, TensorSpec
from samovar.quant.dims import check_cut


class Linear(Layer):
    """y = x W^T + b, the same on every rank. Subclasses only say which axis is split and what is fused.

    `parts` is the number of output features, or {name: features} of checkpoint linears joined into one. With
    `stored_fused` the checkpoint holds the parts as one tensor, one after the other, under the layer's own name.
    """

    split: FeatureAxis | None = None

    def __init__(
        self, in_features: int, parts: int | dict[str, int], *, bias: bool = False, stored_fused: bool = False
    ) -> None:
        super().__init__()
        self.in_features, self.has_bias, self.stored_fused = in_features, bias, stored_fused
        self.parts = parts if isinstance(parts, dict) else {"": parts}

    def bind(self, place: Placement) -> None:
        """Allocate this rank's part of every tensor of the format."""
        self.tp, self.quant = place.tp, place.quant(self.path).of_parts(self._weight_names())
        self.shards = [self.part_shard(name, rows, place) for name, rows in self.parts.items()]
        self.rows = [rows // count for rows, (_, count) in zip(self.parts.values(), self.shards, strict=True)]
        biases = [TensorSpec("bias", place.dtype, (Dim("out"),))] if self.has_bias else []
        self.specs = [*self.quant.tensors, *biases]
        self.part_specs = [[*self.quant.tensors_of(part), *biases] for part in range(len(self.parts))]
        features: dict[FeatureAxis, int] = {
            "out": sum(self.rows),
            "in": self.in_features,
            "part": 1 if self.stored_fused else len(self.parts),
        }
        if self.split == "in":
            features["in"] = self.tp.share(self.in_features, f"the input width of {self.path}")
        self.num_inputs, self.compute_dtype = features["in"], place.dtype
        self._check_cuts()
        self.weights = self.quant.allocate(self.specs, features, self.rows, place.empty)
        self.bias = self.weights.get("bias")

    def _check_cuts(self) -> None:
        """Refuse shares that end inside of what has one scale."""
        for part, (name, rows, (_, count)) in enumerate(zip(self._prefixes(), self.rows, self.shards, strict=True)):
            for spec in self.quant.tensors_of(part):
                if count > 1:
                    check_cut(spec, "out", rows, self.stored(name))
                if self.split == "in" and self.tp.size > 1:
                    check_cut(spec, "in", self.num_inputs, self.stored(name))

    def _weight_names(self) -> list[str]:
        """What the checkpoint calls the weights that are joined here."""
        fused = self.stored_fused and len(self.parts) > 1
        return [self.stored(f"{prefix}.weight") for prefix in ([self.path] if fused else self._prefixes())]

    def _prefixes(self) -> list[str]:
        """Our name of each checkpoint linear that is joined here."""
        parent = self.path.rpartition(".")[0]
        return [".".join(filter(None, (parent, name))) if name else self.path for name in self.parts]

    def part_shard(self, name: str, rows: int, place: Placement) -> tuple[int, int]:
        """`shard_of` for the part `name`: a layer whose parts are shared differently goes by name."""
        return self.shard_of(rows, place)

    def shard_of(self, rows: int, place: Placement) -> tuple[int, int]:
        """Which of how many equal pieces of a part with `rows` output features this rank holds."""
        if self.split != "out":
            return (0, 1)
        place.tp.share(rows, f"the output width of {self.path}")
        return (place.tp.rank, place.tp.size)

    def sources(self) -> list[Source]:
        """One copy per part and stored tensor, or few pieces of the fused tensor."""
        if self.stored_fused and len(self.parts) > 1:
            return [source for spec in self.specs for source in self._fused_sources(spec)]
        row, copies = 0, []
        for part, (prefix, rows, shard) in enumerate(zip(self._prefixes(), self.rows, self.shards, strict=True)):
            for spec in self.part_specs[part]:
                target = self.quant.part_of(self.weights, spec, part, row, rows)
                axis = spec.index_of(self.split) if self.split is not None else None
                pieces = (self.tp.rank, self.tp.size) if self.split == "in" else shard
                whole = axis is None or pieces[1] == 1
                copies.append(
                    Source(self.stored(f"{prefix}.{spec.name}"), target, *((None, (0, 1)) if whole else (axis, pieces)))
                )
            row += rows
        return copies

    def _fused_sources(self, spec: TensorSpec) -> list[Source]:
        """This rank's rows of a tensor whose parts lie one after the other, in the fewest equal pieces."""
        name, target, axis = self.stored(f"{self.path}.{spec.name}"), self.weights[spec.name], spec.index_of("out")
        if axis is None or self.rows == list(self.parts.values()):
            return [Source(name, target)]
        per, copies, row, first = spec.dims[axis].per, [], 0, 0
        total = sum(self.parts.values()) // per
        for features, rows, (which, _) in zip(self.parts.values(), self.rows, self.shards, strict=True):
            start, length = (first + which * rows) // per, rows // per
            unit = gcd(gcd(start, length), total)
            for piece in range(length // unit):
                view = target.narrow(axis, row // per + piece * unit, unit)
                copies.append(Source(name, view, axis, (start // unit + piece, total // unit)))
            first, row = first + features, row + rows
        return copies

    def unread(self) -> set[str]:
        """See `Layer`."""
        return self.zeros()

    def zeros(self) -> set[str]:
        """GPTQ's tools write a bias for every linear, of zeros where the model has none."""
        is_own = self.has_bias or not self.quant.may_store_zero_bias
        return set() if is_own else {name.removesuffix("weight") + "bias" for name in self._weight_names()}

    def dummy(self, source: Source) -> torch.Tensor | None:
        """See `Layer`."""
        return self.quant.dummy(source.name.rpartition(".")[2], source.target)

    def resident_bytes(self) -> int:
        """See `Layer`."""
        return self.quant.resident_bytes(self.weights, self.rows)

    def after_load(self) -> None:
        """Let the format repack its tensors."""
        self.weights = self.quant.after_load(self.weights, self.rows)
        self.bias = self.weights.get("bias")

    def project(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in of this rank] -> [tokens, out of this rank]: this rank's product and nothing else."""
        return self.quant.multiply(x, self.weights, self.bias)

    def project_into(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += `project(x)`, in place; returns it."""
        self.quant.add_multiply(x, self.weights, residual, self.bias)
        return residual

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] -> [tokens, out of this rank]."""
        return self.project(x)


class ColumnLinear(Linear):
    """Output features split over the axis; may fuse several checkpoint linears into one matmul."""

    split = "out"


class RowLinear(Linear):
    """Input features split over the axis; partial sums are all-reduced, the bias is added once, after."""

    split = "in"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in of this rank] -> [tokens, out]."""
        if self.tp.size == 1:
            return self.project(x)
        y = self.tp.all_reduce(self.quant.multiply(x, self.weights))
        return y if self.bias is None else y + self.bias


class HeadsLinear(ColumnLinear):
    """Queries alone: x -> [tokens, heads, head_dim]."""

    is_row_wise = True

    def __init__(self, in_features: int, heads: int, head_dim: int, *, bias: bool = False) -> None:
        super().__init__(in_features, heads * head_dim, bias=bias)
        self.head_dim = head_dim

    def shard_of(self, rows: int, place: Placement) -> tuple[int, int]:
        """Whole heads only."""
        return head_shard(rows // self.head_dim, place)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [tokens, in] -> [tokens, heads of this rank, head_dim]."""
        return self.project(x).view(len(x), -1, self.head_dim)


class QKVLinear(ColumnLinear):
    """q, k and v in one matmul. Key/value heads are copied when there are more ranks than heads.

    Without `has_values` there is no v_proj: what k_proj gives are values, too. `num_paired` features at the beginning of
    each head of q and k are for a rope that pairs neighbours (0 and 1, 2 and 3, ...) in the checkpoint; they are brought
    into the order of halves, as all rope here pairs them: the weights' rows after loading, or results where a format's
    rows cannot be moved. Scores stay what they are.
    """

    def __init__(
        self,
        in_features: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        bias: bool = False,
        stored_fused: bool = False,
        has_values: bool = True,
        num_paired: int = 0,
    ) -> None:
        parts = {"q_proj": heads * head_dim, "k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
        if not has_values:
            del parts["v_proj"]
        super().__init__(in_features, parts, bias=bias, stored_fused=stored_fused)
        self.head_dim, self.has_values, self.num_paired = head_dim, has_values, num_paired

    def bind(self, place: Placement) -> None:
        """Allocate this rank's heads."""
        super().bind(place)
        self.split_heads = [rows // self.head_dim for rows in self.rows]
        self.order = halves_first(self.head_dim, self.num_paired).to(place.device) if self.num_paired else None
        self.sorts_results = self.order is not None and any(self._moves(spec) is None for spec in self.specs)

    def _moves(self, spec: TensorSpec) -> bool | None:
        """Whether a tensor's rows follow the outputs; None if they cannot be moved one by one."""
        axis = spec.index_of("out")
        if axis is None or (spec.dims[axis].per > 1 and spec.dims[axis].per % self.head_dim == 0):
            return False
        return True if spec.dims[axis].per == 1 else None

    def after_load(self) -> None:
        """Sort the rows of q and k, then let the format repack."""
        if self.order is not None and not self.sorts_results:
            row = 0
            for part, rows in enumerate(self.rows[:2]):
                for spec in filter(self._moves, self.specs if self.stored_fused else self.part_specs[part]):
                    view = self.quant.part_of(self.weights, spec, 0 if self.stored_fused else part, row, rows)
                    _sort_heads(view, spec.index_of("out") or 0, self.order)
                row += rows
        super().after_load()

    def shard_of(self, rows: int, place: Placement) -> tuple[int, int]:
        """Whole heads only."""
        return head_shard(rows // self.head_dim, place)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """x [tokens, in] -> q, k, v of this rank, each [tokens, heads, head_dim]."""
        return self.heads_of(self.project(x))

    def heads_of(self, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What `project` gives, as q, k, v."""
        parts = torch.split(y.view(len(y), -1, self.head_dim), self.split_heads, dim=1)
        q, k, v = parts[0], parts[1], parts[-1]
        if self.sorts_results:
            q, k = q[..., self.order], k[..., self.order]
        return q, k, v


def halves_first(head_dim: int, num_paired: int) -> torch.Tensor:
    """int64 [head_dim]: the even ones of the first `num_paired` features, the odd ones, and the rest as it is."""
    pairs = torch.arange(num_paired).view(-1, 2).T.flatten()
    return torch.cat((pairs, torch.arange(num_paired, head_dim)))


def _sort_heads(tensor: torch.Tensor, axis: int, order: torch.Tensor) -> None:
    """Bring each run of len(order) entries along `axis` into that order, in place."""
    heads = tensor.shape[axis] // len(order)
    whole = (torch.arange(heads, device=order.device)[:, None] * len(order) + order).flatten()
    plain = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # torch selects no float8 on CPUs
    plain.copy_(plain.index_select(axis, whole))
