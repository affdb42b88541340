"""Experts whose weights stay packed: those of all experts of a layer in a few tensors, multiplied by one op.

A format packs the experts' linears as if they were the parts of one large linear: rows of gate and up of the first, then
of the second, and so on.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from samovar.kernels.coded_expert_products import coded_expert_products, parts_of
from samovar.kernels.coded_weights import BRICK_ROWS
from samovar.kernels.expert_products import Gate
from samovar.kernels.op import Kernels
from samovar.layers.linear import Linear
from samovar.quant.base import TensorSpec
from samovar.quant.coded import CodedProducts, has_kernel
from samovar.quant.coding import CODES, ORDER, ROW_SCALE, SCALE
from samovar.quant.dims import EachPart
from samovar.quant.gptq import GPTQ
from samovar.quant.packed_int import PackedInt
from samovar.quant.rounded import Rounded
from samovar.quant.stored import Stored
from samovar.quant.whole_int import WholeInt

Stack = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes, scale words and row scales of all experts."""


class CodedExperts:
    """The packed weights of one layer's experts. Exists where all of them are of one kind, and `fill` may still find
    that they cannot be packed."""

    def __init__(self, kind: str, kernels: Kernels, *, interleaved: bool) -> None:
        self.kind, self.interleaved = kind, interleaved
        self.op = kernels.use(coded_expert_products)
        empty = torch.empty(0)
        self.up: Stack = (empty, empty, empty)
        self.down: Stack = (empty, empty, empty)
        self.biases: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)

    @classmethod
    def of(
        cls, pairs: Sequence[tuple[Linear, Linear]], kernels: Kernels, activation: Gate, *, interleaved: bool
    ) -> CodedExperts | None:
        """For bound linears; None if their formats have no kernel here."""
        if not has_kernel(kernels):
            return None
        kinds = {_kind(linear) for pair in pairs for linear in pair}
        up, down = pairs[0]
        rows = [sum(up.rows) // parts_of(activation), sum(down.rows)]
        if len(kinds) != 1 or None in kinds or any(count % BRICK_ROWS for count in rows):
            return None
        if interleaved and not all(_rows_lie_apart(spec) for spec in up.quant.tensors):
            return None
        made = cls(str(kinds.pop()), kernels, interleaved=interleaved)
        return None if kernels.routes[coded_expert_products.name].chosen == "reference" else made

    def num_bytes(self, pairs: Sequence[tuple[Linear, Linear]], kernels: Kernels) -> int:
        """What the packed weights and the biases take."""
        products, linears = CodedProducts(self.kind, kernels), [linear for pair in pairs for linear in pair]
        biases = sum(linear.bias.nbytes for linear in linears if linear.bias is not None)
        return sum(products.num_bytes(sum(linear.rows), linear.num_inputs) for linear in linears) + biases

    def stand_in(self, pairs: Sequence[tuple[Linear, Linear]], kernels: Kernels) -> None:
        """What `fill` will make, without memory: kernels are prepared with it."""
        products, count = CodedProducts(self.kind, kernels), len(pairs)

        def many(linear: Linear) -> Stack:
            codes, scale, row_scale, _ = products.without_memory(sum(linear.rows), linear.num_inputs)
            return codes.expand(count, *codes.shape), scale.expand(count, *scale.shape), row_scale.expand(count, -1)

        up, down = pairs[0]
        self.up, self.down = many(up), many(down)
        self._take_biases(pairs)

    def fill(self, pairs: Sequence[tuple[Linear, Linear]], *, has_down_bias: bool = True) -> bool:
        """Pack what was loaded; the linears keep nothing but their biases. False if it cannot be packed after all."""
        up = _packed([pair[0] for pair in pairs], interleaved=self.interleaved)
        down = None if up is None else _packed([pair[1] for pair in pairs], interleaved=False)
        if up is None or down is None:
            return False
        self.up, self.down = up, down
        for pair in pairs:
            for linear in pair:
                linear.weights = {} if linear.bias is None else {"bias": linear.bias}
        self._take_biases(pairs)
        if not has_down_bias:
            self.biases = self.biases[0], None
        return True

    def _take_biases(self, pairs: Sequence[tuple[Linear, Linear]]) -> None:
        found: list[torch.Tensor | None] = []
        for at in range(2):
            biases = [bias for pair in pairs if (bias := pair[at].bias) is not None]
            stacked = torch.stack(biases) if biases else None
            if stacked is not None and self.interleaved and at == 0:
                stacked = torch.cat((stacked[:, ::2], stacked[:, 1::2]), 1)
            found.append(stacked)
        self.biases = found[0], found[1]

    def __call__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        activation: Gate,
        limit: float,
        first: int,
        residual: torch.Tensor | None,
    ) -> torch.Tensor:
        """See the op."""
        up_bias, down_bias = self.biases
        return self.op(
            x, ids, weights, *self.up, *self.down, self.kind, activation, up_bias, down_bias, limit, first, residual
        )

    def tensors(self) -> list[torch.Tensor]:
        """Everything that is held."""
        return [*self.up, *self.down, *(bias for bias in self.biases if bias is not None)]


def _kind(linear: Linear) -> str | None:
    """Of packed weights; None for what has tensors by other names than its specs, for act-order, which each expert has
    its own of, and for bytes with zero points, of which only their values say whether they can be packed."""
    method = _unrounded(linear.quant) if isinstance(linear.quant, Stored) else None
    if method is None or any(spec.name not in linear.weights for spec in method.tensors):
        return None
    if isinstance(method, GPTQ) and (
        method.scheme.has_order or (method.scheme.bits > 4 and not method.scheme.is_symmetric)
    ):
        return None
    if isinstance(method, PackedInt) and method.scheme.bits > 4 and not method.scheme.is_symmetric:
        return None
    if isinstance(method, WholeInt) and method.scheme.zero is not None:
        return None
    return method.kind()


def _unrounded(method: Stored) -> Stored:
    """The same weights with activations as they are: packed weights are multiplied with those."""
    if not isinstance(method, Rounded) or method.inputs is None:
        return method
    plain = copy.copy(method)
    plain.inputs, plain.products = None, None
    return plain


def _rows_lie_apart(spec: TensorSpec) -> bool:
    """Whether each row of the weight has rows of its own in a stored tensor, so that rows can change places."""
    axis = spec.index_of("out")
    return axis is None or spec.dims[axis].per == 1


def _packed(linears: Sequence[Linear], *, interleaved: bool) -> Stack | None:
    """The weights of linears of one format as one packed weight; with `interleaved` rows in turns come apart."""
    method = linears[0].quant
    assert isinstance(method, Stored)
    whole = copy.copy(_unrounded(method))
    parts = list(method.part_rows)
    whole.part_rows, whole.names = parts * len(linears), method.names * len(linears)
    stored = {}
    for spec in method.tensors:
        axis = _axis(spec)
        if axis is None:
            return None
        pieces = [linear.weights[spec.name] for linear in linears]
        if interleaved and spec.index_of("out") is not None:
            pieces = [
                torch.cat((_every_second(piece, axis, 0), _every_second(piece, axis, 1)), axis) for piece in pieces
            ]
        stored[spec.name] = torch.cat(pieces, axis)
    whole.choose_coded()
    kept = whole.for_kernel(whole.repack(stored))
    if CODES not in kept or ORDER in kept:
        return None
    codes, scale, row_scale = (kept[name].view(len(linears), -1, *kept[name].shape[1:]) for name in _PACKED)
    return codes, scale, row_scale


_PACKED = (CODES, SCALE, ROW_SCALE)


def _axis(spec: TensorSpec) -> int | None:
    """Along which axis of a stored tensor one linear follows the other."""
    if isinstance(spec, EachPart):
        return 0
    found = spec.index_of("out")
    return spec.index_of("part") if found is None else found


def _every_second(piece: torch.Tensor, axis: int, first: int) -> torch.Tensor:
    """Every second entry along an axis."""
    return piece.index_select(axis, torch.arange(first, piece.shape[axis], 2, device=piece.device))
