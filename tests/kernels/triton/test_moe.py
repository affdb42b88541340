"""Routers and experts in Triton: against their references, with every plan, beside poison, and alike at every batch size."""

from __future__ import annotations

import pytest
import torch

from samovar.kernels.expert_products import expert_products
from samovar.kernels.expert_products import triton as experts
from samovar.kernels.expert_products.tiles import BLOCKS, BlockTile, PairTile, Plan, fitting, most_blocks, plan
from samovar.kernels.op import OPS, compare, load_ops
from samovar.kernels.route import route
from samovar.kernels.route.triton import route_triton
from samovar.kernels.triton_launch import SHARED_BYTES

load_ops("cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = [("route", "triton"), ("expert_products", "triton"), ("expert_products", "triton_fixed")]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "impl"), KINDS)
def test_each_op_matches_its_reference(name: str, impl: str, dtype: torch.dtype) -> None:
    op = OPS[name]
    assert op.make_examples is not None
    for example in op.make_examples():
        assert compare(op, op.impls[impl].function, example, dtype, "cpu") is None


def operands(
    tokens: int, k: int, count: int, inner: int, hidden: int, dtype: torch.dtype = torch.float32
) -> list[torch.Tensor]:
    """x, ids, weights, gate_up, down."""
    ids = torch.rand(tokens, count).argsort(-1)[:, :k].int()
    wide = torch.randn(count, 2 * inner, hidden) / hidden**0.5, torch.randn(count, hidden, inner) / inner**0.5
    floats = [torch.randn(tokens, hidden), torch.rand(tokens, k), *wide]
    x, weights, gate_up, down = (each.to(dtype) for each in floats)
    return [x, ids, weights, gate_up, down]


PLANS = [
    Plan(PairTile(16, 32), PairTile(32, 16)),
    Plan(PairTile(8, 64), PairTile(16, 64)),
    Plan(BlockTile(16, 32, 32), BlockTile(16, 16, 32)),
    Plan(BlockTile(16, 16, 32), BlockTile(16, 32, 16), is_sorted=True),
    Plan(BlockTile(64, 32, 32), BlockTile(64, 32, 16), is_sorted=True),
]


@pytest.mark.parametrize("how", PLANS, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
def test_every_plan_computes_everything(how: Plan, interleaved: bool) -> None:
    """Sizes that are multiples of nothing, experts elsewhere on both sides, biases, and a residual."""
    tokens, inner, hidden = 2 if isinstance(how.gate_up, PairTile) else 13, 37, 50
    x, ids, weights, gate_up, down = operands(tokens, 3, 7, inner, hidden)
    biases, residual = (torch.randn(7, 2 * inner), torch.randn(7, hidden)), torch.randn(tokens, hidden)
    here = slice(2, 6)
    rest = ("clamped", *(bias[here] for bias in biases), interleaved, 0.8, 2, residual)
    expected = expert_products(x, ids, weights, gate_up[here], down[here], *rest)  # type: ignore[arg-type]
    got = experts.multiply(how, x, ids, weights, gate_up[here], down[here], *rest)  # type: ignore[arg-type]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_one_expert_may_have_all_tokens_and_most_none() -> None:
    x, ids, weights, gate_up, down = operands(40, 1, 9, 16, 32)
    ids.fill_(7)
    for how in PLANS[2:]:
        if how.is_sorted:
            got = experts.multiply(how, x, ids, weights, gate_up, down, "silu")
            torch.testing.assert_close(
                got, expert_products(x, ids, weights, gate_up, down, "silu"), atol=1e-5, rtol=1e-5
            )


@pytest.mark.parametrize("size", [16, 64])
def test_pairs_are_sorted_into_blocks(size: int) -> None:
    """Every pair that is here stands once, in a block of its expert, ascending; all else is marked."""
    ids = torch.rand(90, 11).argsort(-1)[:, :4].int()
    x, first, count = torch.zeros(90, 8), 3, 6
    call = experts._Call(x, ids, ids, torch.zeros(count, 2, 8), torch.zeros(count, 8, 1), first, None)
    call.sort(size)
    assert call.order is not None and call.owners is not None
    blocks, flat = call.order.view(-1, size).tolist(), ids.flatten().tolist()
    found: dict[int, list[int]] = {}
    for owner, block in zip(call.owners.tolist(), blocks, strict=True):
        if owner >= 0:
            found.setdefault(owner, []).extend(pair for pair in block if pair >= 0)
            assert block[0] >= 0
    expected = {e: [p for p, each in enumerate(flat) if each == e + first] for e in range(count)}
    assert found == {e: pairs for e, pairs in expected.items() if pairs}
    assert list(found) == sorted(found)


def test_blocks_are_enough_whatever_is_chosen() -> None:
    for pairs, count, size in ((1, 4, 16), (64, 128, 16), (1024, 128, 16), (800, 3, 64)):
        spread = [pairs // count + (e < pairs % count) for e in range(count)]
        lumped = [1] * min(count - 1, pairs - 1) + [pairs - min(count - 1, pairs - 1)]
        for counts in (spread, lumped, [pairs]):
            assert sum(-(-each // size) for each in counts) <= most_blocks(pairs, count, size)


def test_fixed_rows_do_not_depend_on_others() -> None:
    x, ids, weights, gate_up, down = operands(70, 2, 5, 24, 48, torch.bfloat16)
    whole = experts.expert_products_fixed(x, ids, weights, gate_up, down, "silu")
    for tokens in (1, 2, 33):
        part = experts.expert_products_fixed(x[:tokens], ids[:tokens], weights[:tokens], gate_up, down, "silu")
        assert torch.equal(part, whole[:tokens])


def test_equal_scores_go_to_the_first() -> None:
    logits = torch.zeros(2, 24)
    logits[1, 9] = 1.0
    for function in (route, route_triton):
        _, ids = function(logits, None, 4, "softmax")
        assert ids.tolist() == [[0, 1, 2, 3], [9, 0, 1, 2]]
        _, ids = function(logits, torch.zeros(24), 4, "sigmoid", True, 1.0, 3, 2)
        assert ids.tolist() == [[0, 1, 2, 3], [9, 0, 1, 2]]


def test_weights_that_are_not_contiguous_are_refused() -> None:
    x, ids, weights, gate_up, down = operands(2, 2, 4, 16, 32)
    with pytest.raises(ValueError, match="make them contiguous"):
        experts.multiply(PLANS[0], x, ids, weights, gate_up, down.transpose(1, 2).contiguous().transpose(1, 2), "silu")


@pytest.mark.parametrize("capability", [90, 120, 80])
@pytest.mark.parametrize("element_size", [2, 4])
def test_tiles_fit(capability: int, element_size: int) -> None:
    """Every plan fits the chip's shared memory and has powers of two; a batch of any size has one."""
    shared = SHARED_BYTES[capability]
    for tokens in (1, 2, 3, 8, 17, 33, 100, 1000, 9000):
        how = plan(tokens, 8, 128, 768, 2048, element_size=element_size, shared=shared)
        for tile, parts in ((how.gate_up, 2), (how.down, 1)):
            if isinstance(tile, BlockTile):
                assert tile.shared_bytes(parts, element_size) <= shared
                assert how.is_sorted or tile.tokens >= tokens
                assert all(size & (size - 1) == 0 and size >= 16 for size in (tile.tokens, tile.rows, tile.depth))
    for tiles in BLOCKS.values():
        assert tiles[0] == fitting(tiles[0], 2, 2, SHARED_BYTES[90]) and tiles[0].tokens == tiles[1].tokens
