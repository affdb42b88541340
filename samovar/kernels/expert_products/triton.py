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

from samovar.kernels.expert_products import CLAMPED_ALPHA, Gate, expert_products
from samovar.kernels.expert_products.tiles import BlockTile, PairTile, Plan, fixed_plan, most_blocks, plan
from samovar.kernels.linear.triton import WITHOUT_DOT
from samovar.kernels.op import Target
from samovar.kernels.overlap import launch_options
from samovar.kernels.overlap.triton import await_previous, start_next
from samovar.kernels.triton_launch import SHARED_BYTES, cdiv, launch, next_power_of_2

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Triton's interpreter multiplies matrices of bfloat16 as if they were integers: it gets float32."""
ALPHA = tl.constexpr(CLAMPED_ALPHA)

FEW_AT_ONCE, MANY_AT_ONCE = 1024, 4096
"""Pairs that the kernel that sorts looks at together, for the smallest blocks and for larger ones."""

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
def _gated(gate: tl.tensor, up: tl.tensor, limit: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """See `expert_products.gated`; all in float32."""
    if KIND == "clamped":
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate * tl.sigmoid(gate * ALPHA) * (up + 1.0)
    elif KIND == "silu":
        return gate * tl.sigmoid(gate) * up
    else:
        return gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up


@triton.jit
def _bias(bias: tl.tensor, expert: tl.tensor, N: tl.constexpr, rows: tl.tensor) -> tl.tensor:
    """Entries `rows` of an expert's bias, float32; rows beyond the end get one that nobody uses."""
    return tl.load(bias + expert * N + tl.minimum(rows, N - 1)).to(tl.float32)


@triton.jit
def _weights(start: tl.tensor, rows: tl.tensor, columns: tl.tensor, K: tl.constexpr, EVEN: tl.constexpr) -> tl.tensor:
    """[rows, columns] of a weight with K inputs. They are read once: nothing else should leave the caches for them."""
    at = start + rows[:, None] * K + columns[None, :]
    if EVEN:
        return tl.load(at, eviction_policy="evict_first")
    else:
        return tl.load(at, mask=columns[None, :] < K, other=0.0, eviction_policy="evict_first")


@triton.jit
def _vector(x: tl.tensor, columns: tl.tensor, K: tl.constexpr, EVEN: tl.constexpr) -> tl.tensor:
    """[1, columns] float32 of a vector of length K."""
    if EVEN:
        return tl.load(x + columns[None, :]).to(tl.float32)
    else:
        return tl.load(x + columns[None, :], mask=columns[None, :] < K, other=0.0).to(tl.float32)


@triton.jit
def pair_gated_kernel(
    x: tl.tensor,
    ids: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    limit: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    GATE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [pairs, N] = gated product of a pair's token with its expert's weight [2N, K]: BN results per program."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    pair = tl.program_id(1)
    EVEN: tl.constexpr = K % BK == 0
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    UP: tl.constexpr = 1 if INTERLEAVED else N
    await_previous(OVERLAP)
    expert = tl.load(ids + pair) - first
    if (expert >= 0) & (expert < EXPERTS):
        start = weight + expert.to(tl.int64) * (2 * N * K)
        at = tl.minimum(rows, N - 1) * STEP
        here = x + (pair // TOP_K).to(tl.int64) * K
        total = tl.zeros((BN, BK), tl.float32)
        total_up = tl.zeros((BN, BK), tl.float32)
        for k in range(0, K, BK):
            columns = k + tl.arange(0, BK)
            tile = _weights(start, at, columns, K, EVEN)
            tile_up = _weights(start, at + UP, columns, K, EVEN)
            part = _vector(here, columns, K, EVEN)
            total += tile.to(tl.float32) * part
            total_up += tile_up.to(tl.float32) * part
        gate, up = tl.sum(total, 1), tl.sum(total_up, 1)
        if bias is not None:
            gate += _bias(bias, expert, 2 * N, at)
            up += _bias(bias, expert, 2 * N, at + UP)
        y = _gated(gate, up, limit, GATE)
        tl.store(out + pair.to(tl.int64) * N + rows, y.to(out.dtype.element_ty), mask=rows < N)
    start_next(OVERLAP)


@triton.jit
def pair_down_kernel(
    h: tl.tensor,
    ids: tl.tensor,
    routing: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [tokens, N] = the sum over the pairs of a token of routing * (weight [N, K] of its expert times h [pairs, K])."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    at = tl.minimum(rows, N - 1)
    token = tl.program_id(1)
    EVEN: tl.constexpr = K % BK == 0
    await_previous(OVERLAP)
    total = tl.zeros((BN, BK), tl.float32)
    biases = tl.zeros((BN,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair) - first
        is_here = (expert >= 0) & (expert < EXPERTS)
        expert = tl.where(is_here, expert, 0)
        share = tl.where(is_here, tl.load(routing + pair).to(tl.float32), 0.0)
        start = weight + expert.to(tl.int64) * (N * K)
        here = h + pair.to(tl.int64) * K
        for k in tl.static_range(0, K, BK):
            columns = k + tl.arange(0, BK)
            tile = _weights(start, at, columns, K, EVEN)
            # What an expert elsewhere would have left here is not written.
            part = tl.where(is_here, _vector(here, columns, K, EVEN), 0.0) * share
            total += tile.to(tl.float32) * part
        if bias is not None:
            biases += share * _bias(bias, expert, N, at)
    start_next(OVERLAP)
    y = tl.sum(total, 1) + biases
    if residual is not None:
        y += tl.load(residual + token.to(tl.int64) * N + at).to(tl.float32)
    tl.store(out + token.to(tl.int64) * N + rows, y.to(out.dtype.element_ty), mask=rows < N)


@triton.jit(do_not_specialize=["pairs", "blocks"])
def sort_kernel(
    ids: tl.tensor,
    order: tl.tensor,
    owners: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BM: tl.constexpr,
    SIZE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """order [blocks, BM]: the pairs of each expert, ascending, in blocks that begin anew with each expert, -1 behind the
    last; owners [blocks]: the expert of each block, -1 for none. One program per expert, which counts all for itself.

    BINS is a power of two above EXPERTS: the bins beyond count what is not here.
    """
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    within = tl.arange(0, SIZE)
    await_previous(OVERLAP)
    counts = tl.zeros((BINS,), tl.int32)
    for begin in range(0, pairs, SIZE):
        at = begin + within
        found = tl.load(ids + at, mask=at < pairs, other=-1) - first
        found = tl.where((at < pairs) & (found >= 0) & (found < EXPERTS), found, EXPERTS)
        counts += tl.histogram(found, BINS)
    needed = tl.where(bins < EXPERTS, (counts + (BM - 1)) // BM, 0)
    start = tl.sum(tl.where(bins < expert, needed, 0), 0)
    own = tl.sum(tl.where(bins == expert, needed, 0), 0)
    for block in range(start, start + own):
        tl.store(owners + block, expert)
    if expert == EXPERTS - 1:
        for begin in range(start + own, blocks, BINS):
            tl.store(owners + begin + bins, tl.full((BINS,), -1, tl.int32), mask=begin + bins < blocks)
    place = start * BM
    for begin in range(0, pairs, SIZE):
        at = begin + within
        is_own = (at < pairs) & (tl.load(ids + at, mask=at < pairs, other=-1) - first == expert)
        rank = tl.cumsum(is_own.to(tl.int32), 0)
        tl.store(order + place + rank - 1, at, mask=is_own)
        place += tl.sum(is_own.to(tl.int32), 0)
    rest = place + tl.arange(0, BM)
    tl.store(order + rest, tl.full((BM,), -1, tl.int32), mask=rest < (start + own) * BM)
    start_next(OVERLAP)


@triton.jit
def _pairs_of(
    ids: tl.tensor, expert: tl.tensor, tokens: tl.tensor, TOP_K: tl.constexpr, BM: tl.constexpr, SLOTS: tl.constexpr
) -> tl.tensor:
    """[BM]: the pair at which each of the first BM tokens has `expert`; -1 for none."""
    token, slot = tl.arange(0, BM)[:, None], tl.arange(0, SLOTS)[None, :]
    pair = token * TOP_K + slot
    inside = (token < tokens) & (slot < TOP_K)
    found = tl.load(ids + pair, mask=inside, other=-1)
    return tl.max(tl.where(inside & (found == expert), pair, -1), 1)


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
    PARTS: tl.constexpr = 1 if GATE is None else 2
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    UP: tl.constexpr = 1 if INTERLEAVED else N
    await_previous(OVERLAP)
    if order is not None:
        expert = tl.load(owners + tl.program_id(1))
        pair = tl.load(order + tl.program_id(1) * BM + tl.arange(0, BM))
    else:
        expert = tl.program_id(1)
        pair = _pairs_of(ids, expert + first, tokens, TOP_K, BM, SLOTS)
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
            if GATE is not None:
                tile_up = _tile(start + UP * K + k, at, inside, EVEN)
                total_up = _dot(tile_up, part, total_up, TOKENS_FIRST)
        if bias is not None:
            value = _bias(bias, expert, PARTS * N, rows)
            total += value[None, :] if TOKENS_FIRST else value[:, None]
            if GATE is not None:
                value = _bias(bias, expert, PARTS * N, rows + UP)
                total_up += value[None, :] if TOKENS_FIRST else value[:, None]
        if GATE is not None:
            total = _gated(total, total_up, limit, GATE)
        rows = first_row + tl.arange(0, BN)
        target = tl.maximum(pair, 0).to(tl.int64) * N
        if TOKENS_FIRST:
            places_out, is_stored = target[:, None] + rows[None, :], is_pair[:, None] & (rows < N)[None, :]
        else:
            places_out, is_stored = target[None, :] + rows[:, None], is_pair[None, :] & (rows < N)[:, None]
        tl.store(out + places_out, total.to(out.dtype.element_ty), mask=is_stored)
    start_next(OVERLAP)


@triton.jit
def sum_kernel(
    results: tl.tensor,
    ids: tl.tensor,
    routing: tl.tensor,
    residual: tl.tensor,
    out: tl.tensor,
    first: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    BN: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """out [tokens, N] = the sum over a token's pairs, in order, of routing * results [pairs, N], and residual [tokens, N]
    if there is one: BN columns of a token."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    await_previous(OVERLAP)
    start_next(OVERLAP)
    total = tl.zeros((BN,), tl.float32)
    for slot in tl.static_range(TOP_K):
        pair = token * TOP_K + slot
        expert = tl.load(ids + pair) - first
        # What an expert elsewhere would have left here is not written.
        end = tl.where((expert >= 0) & (expert < EXPERTS), N, 0)
        share = tl.load(routing + pair).to(tl.float32)
        y = tl.load(results + pair.to(tl.int64) * N + columns, mask=columns < end, other=0.0)
        total += share * y.to(tl.float32)
    if residual is not None:
        total += tl.load(residual + token.to(tl.int64) * N + columns, mask=columns < N, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * N + columns, total.to(out.dtype.element_ty), mask=columns < N)


class _Call:
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
        self.x, self.ids, self.routing, self.first = x.contiguous(), ids.contiguous(), weights.contiguous(), first
        self.residual = None if residual is None else residual.contiguous()
        self.gate_up, self.down = gate_up, down
        self.tokens, self.top_k = ids.shape
        self.experts, self.hidden, self.inner = down.shape
        self.order: torch.Tensor | None = None
        self.owners: torch.Tensor | None = None
        self.blocks = self.experts

    def sort(self, size: int) -> None:
        """Put the pairs of each expert into blocks of `size`."""
        pairs = self.tokens * self.top_k
        self.blocks = most_blocks(pairs, self.experts, size)
        self.order = self.ids.new_empty(self.blocks * size)
        self.owners = self.ids.new_empty(self.blocks)
        options = {"EXPERTS": self.experts, "BINS": next_power_of_2(self.experts + 1), "BM": size}
        options |= {"SIZE": FEW_AT_ONCE if size <= 16 else MANY_AT_ONCE, "num_warps": 4 if size <= 16 else 8}
        tensors = (self.ids, self.order, self.owners)
        launch(sort_kernel, (self.experts,), *tensors, pairs, self.blocks, self.first, **options, **launch_options())

    def product(
        self,
        tile: BlockTile,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gate: tuple[Gate, bool, float] | None,
    ) -> torch.Tensor:
        """x by token or by pair -> [pairs, n]; `gate` is (activation, interleaved, limit)."""
        n, k = weight.shape[1] // (1 if gate is None else 2), weight.shape[2]
        activation, interleaved, limit = gate or (None, False, 0.0)
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

    def sum(self, results: torch.Tensor) -> torch.Tensor:
        """results [pairs, hidden] -> [tokens, hidden]."""
        out, columns = torch.empty_like(self.x), min(next_power_of_2(self.hidden), 2048)
        options = {"EXPERTS": self.experts, "TOP_K": self.top_k, "N": self.hidden, "BN": columns, "num_warps": 4}
        grid = (self.tokens, cdiv(self.hidden, columns))
        tensors = (results, self.ids, self.routing, self.residual, out)
        launch(sum_kernel, grid, *tensors, self.first, **options, **launch_options())
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
