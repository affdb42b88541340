"""Experts in Triton, without moving a token: kernels gather the rows of their expert and scatter what they make.

A pair is token * k + slot: one token at one of its experts. Activated inner states are kept by pair, results of experts,
too, and a last kernel sums the k of a token in their order, so that nothing depends on which program ran first. Grids
depend on shapes only, programs without work end at once, and nothing waits for the host: a captured graph serves
whatever the router chooses.

One or two tokens: vectors times weights, memory-bound, and the sum over experts inside the second product. More: tiles
on the tensor cores, see `tiles`. For few tokens in a tile the weight is the left operand, as in `kernels/linear`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from samovar.kernels.expert_products import UNGATED, Gate, expert_products
from samovar.kernels.expert_products.grouping.triton import Grouping, bias_of, gate_value, pairs_of
from samovar.kernels.expert_products.pairs.triton import pair_down_kernel, pair_gated_kernel
from samovar.kernels.expert_products.tiles import BlockTile, PairTile, Plan, fixed_plan, plan
from samovar.kernels.linear.triton import WITHOUT_DOT
from samovar.kernels.op import Target
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.triton_launch import SHARED_BYTES, cdiv, launch, next_power_of_2

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter multiplies matrices of bfloat16 as if they were integers: it gets float32."""
_has_dot, _shared = True, SHARED_BYTES[90]


def adapt(architecture: str) -> None:
    """Take note of what the chip can do; see `kernels.linear.triton.adapt`."""
    global _has_dot, _shared
    _has_dot = architecture not in WITHOUT_DOT
    _shared = SHARED_BYTES.get(int(architecture.removeprefix("sm_")), min(SHARED_BYTES.values()))


def accepts(target: Target) -> str | None:
    """Every architecture, but no rows computed alike at every batch size; adapts to the chip."""
    if target.deterministic:
        return "its tiles depend on the number of tokens"
    adapt(target.architecture)
    return None


def accepts_fixed(target: Target) -> str | None:
    """Only where it is asked for: fixed tiles are slower."""
    if not target.deterministic:
        return "only with --deterministic"
    adapt(target.architecture)
    return None


@triton.jit
def _dot(tile: tl.tensor, part: tl.tensor, total: tl.tensor, TOKENS_FIRST: tl.constexpr) -> tl.tensor:
    """total + tile part^T, or its transpose; tile [rows, depth] of a weight, part [tokens, depth]."""
    if INTERPRETED:
        tile, part = tile.to(tl.float32), part.to(tl.float32)
    if TOKENS_FIRST:
        return tl.dot(part, tl.trans(tile), total, input_precision="ieee")
    else:
        return tl.dot(tile, tl.trans(part), total, input_precision="ieee")


@triton.jit
def _tile(start: tl.tensor, at: tl.tensor, inside: tl.tensor, EVEN: tl.constexpr) -> tl.tensor:
    if EVEN:
        return tl.load(start + at)
    else:
        return tl.load(start + at, mask=inside, other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def block_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    ids: tl.tensor,
    order: tl.tensor,
    owners: tl.tensor,
    tokens: tl.tensor,
    limit: tl.tensor,
    first: tl.tensor,
    TOP_K: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    SLOTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [pairs, N] = (gated) product with the weight [N, K], with GATE [2N, K], of each pair's expert: up to BM pairs of
    one expert and BN results per program. Row r of x belongs to the PAIRS_PER_ROW pairs from r * PAIRS_PER_ROW on.

    With `order` and `owners` from `sort_kernel` the second axis of the grid goes over its blocks, without over experts.
    """
    first_row = tl.program_id(0) * BN
    TOKENS_FIRST: tl.constexpr = BM >= 64
    EVEN: tl.constexpr = K % BK == 0
    PARTS: tl.constexpr = 1 if GATE is None or GATE == "relu2" else 2
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    UP: tl.constexpr = 1 if INTERLEAVED else N
    await_previous(OVERLAP)
    if order is not None:
        expert = tl.load(owners + tl.program_id(1))
        pair = tl.load(order + tl.program_id(1) * BM + tl.arange(0, BM))
    else:
        expert = tl.program_id(1)
        pair = pairs_of(ids, expert + first, tokens, TOP_K, BM, SLOTS)
    is_pair = pair >= 0
    if (expert >= 0) & (tl.max(pair, 0) >= 0):
        columns = tl.arange(0, BK)[None, :]
        rows = tl.minimum(first_row + tl.arange(0, BN), N - 1) * STEP
        start = weight + expert.to(tl.int64) * (PARTS * N * K)
        at = rows[:, None] * K + columns
        places = tl.maximum(pair, 0) // PAIRS_PER_ROW
        inputs = x + places.to(tl.int64)[:, None] * K + columns
        if TOKENS_FIRST:
            total = tl.zeros((BM, BN), tl.float32)
        else:
            total = tl.zeros((BN, BM), tl.float32)
        total_up = total
        for k in range(0, K, BK):
            inside = columns < K - k
            part = tl.load(inputs + k, mask=is_pair[:, None] & inside, other=0.0)
            tile = _tile(start + k, at, inside, EVEN)
            total = _dot(tile, part, total, TOKENS_FIRST)
            if PARTS == 2:
                tile_up = _tile(start + UP * K + k, at, inside, EVEN)
                total_up = _dot(tile_up, part, total_up, TOKENS_FIRST)
        if bias is not None:
            value = bias_of(bias, expert, PARTS * N, rows)
            total += value[None, :] if TOKENS_FIRST else value[:, None]
            if PARTS == 2:
                value = bias_of(bias, expert, PARTS * N, rows + UP)
                total_up += value[None, :] if TOKENS_FIRST else value[:, None]
        if GATE is not None:
            total = gate_value(total, total_up, limit, GATE)
        rows = first_row + tl.arange(0, BN)
        target = tl.maximum(pair, 0).to(tl.int64) * N
        if TOKENS_FIRST:
            places_out, is_stored = target[:, None] + rows[None, :], is_pair[:, None] & (rows < N)[None, :]
        else:
            places_out, is_stored = target[None, :] + rows[:, None], is_pair[None, :] & (rows < N)[:, None]
        tl.store(out + places_out, total.to(out.dtype.element_ty), mask=is_stored)
    start_next(OVERLAP)


class _Call(Grouping):
    """One call of the op: its operands, and what its kernels share."""

    def __init__(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        first: int,
        residual: torch.Tensor | None,
    ) -> None:
        for tensor in (gate_up, down):
            if not tensor.is_contiguous():
                shape, strides = tuple(tensor.shape), tensor.stride()
                raise ValueError(f"weights of shape {shape} have strides {strides}: make them contiguous")
        super().__init__(x, ids, weights, len(down), first, residual)
        self.gate_up, self.down = gate_up, down
        self.inner = down.shape[2]

    def product(
        self,
        tile: BlockTile,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gate: tuple[Gate, bool, float] | None,
    ) -> torch.Tensor:
        """x by token or by pair -> [pairs, n]; `gate` is (activation, interleaved, limit)."""
        activation, interleaved, limit = gate or (None, False, 0.0)
        n, k = weight.shape[1] // (1 if activation is None or activation in UNGATED else 2), weight.shape[2]
        out = x.new_empty(self.tokens * self.top_k, n)
        options: dict[str, Any] = {
            "TOP_K": self.top_k,
            "PAIRS_PER_ROW": 1 if gate is None else self.top_k,
            "N": n,
            "K": k,
        }
        options |= {"GATE": activation, "INTERLEAVED": interleaved, "SLOTS": next_power_of_2(self.top_k)}
        options |= {"BM": tile.tokens, "BN": tile.rows, "BK": tile.depth}
        options |= {"num_warps": tile.warps, "num_stages": tile.stages}
        tensors = (x, weight, bias, out, self.ids, self.order, self.owners)
        grid = (cdiv(n, tile.rows), self.blocks if self.tokens else 0)
        launch(block_kernel, grid, *tensors, self.tokens, limit, self.first, **options, **launch_options())
        return out

    def as_pairs(
        self,
        tiles: tuple[PairTile, PairTile],
        biases: tuple[torch.Tensor | None, torch.Tensor | None],
        gate: tuple[Gate, bool, float],
    ) -> torch.Tensor:
        """Both products on the CUDA cores, and the sum."""
        activation, interleaved, limit = gate
        h, out = self.x.new_empty(self.tokens * self.top_k, self.inner), torch.empty_like(self.x)
        shared = {"EXPERTS": self.experts, "TOP_K": self.top_k, **launch_options()}
        options: dict[str, Any] = {"N": self.inner, "K": self.hidden, "GATE": activation, "INTERLEAVED": interleaved}
        options |= {"BN": tiles[0].rows, "BK": tiles[0].columns, "num_warps": tiles[0].warps, **shared}
        grid = (cdiv(self.inner, tiles[0].rows), self.tokens * self.top_k)
        launch(pair_gated_kernel, grid, self.x, self.ids, self.gate_up, biases[0], h, limit, self.first, **options)
        options = {"N": self.hidden, "K": self.inner, "BN": tiles[1].rows, "BK": tiles[1].columns}
        options |= {"num_warps": tiles[1].warps, **shared}
        grid = (cdiv(self.hidden, tiles[1].rows), self.tokens)
        tensors = (h, self.ids, self.routing, self.down, biases[1], self.residual, out)
        launch(pair_down_kernel, grid, *tensors, self.first, **options)
        return out


def multiply(
    how: Plan,
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    limit: float = 0.0,
    first: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """`expert_products` by a plan. Raises `ValueError` for weights that are not contiguous."""
    call, gate = _Call(x, ids, weights, gate_up, down, first, residual), (activation, interleaved, limit)
    if isinstance(how.gate_up, PairTile) and isinstance(how.down, PairTile):
        return call.as_pairs((how.gate_up, how.down), (gate_up_bias, down_bias), gate)
    assert isinstance(how.gate_up, BlockTile) and isinstance(how.down, BlockTile)
    if how.is_sorted:
        call.sort(how.gate_up.tokens)
    h = call.product(how.gate_up, call.x, gate_up, gate_up_bias, gate)
    return call.sum(call.product(how.down, h, down, down_bias, None))


@expert_products.impl("triton", devices=("cuda",), accepts=accepts)
def expert_products_triton(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    limit: float = 0.0,
    first: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """Kernels by the number of tokens, see `tiles`."""
    experts, hidden, inner = down.shape
    sizes = {"element_size": x.element_size(), "shared": _shared}
    how = plan(len(x), ids.shape[1], experts, inner, hidden, has_dot=_has_dot, **sizes)
    rest = (activation, gate_up_bias, down_bias, interleaved, limit, first, residual)
    return multiply(how, x, ids, weights, gate_up, down, *rest)


@expert_products.impl("triton_fixed", devices=("cuda",), accepts=accepts_fixed)
def expert_products_fixed(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    activation: Gate,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    interleaved: bool = False,
    limit: float = 0.0,
    first: int = 0,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same instructions for a row whatever is computed beside it."""
    how = fixed_plan(element_size=x.element_size(), shared=_shared)
    rest = (activation, gate_up_bias, down_bias, interleaved, limit, first, residual)
    return multiply(how, x, ids, weights, gate_up, down, *rest)
