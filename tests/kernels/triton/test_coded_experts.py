"""Experts with packed weights in Triton: against their reference, with every plan, and beside experts that are elsewhere."""

from __future__ import annotations

import pytest
import torch

from samovar.kernels.coded_expert_products import coded_expert_products, random_experts
from samovar.kernels.coded_expert_products import triton as experts
from samovar.kernels.coded_expert_products.tiles import TILES, Plan, plan
from samovar.kernels.coded_linear.tiles import shared_bytes
from samovar.kernels.expert_products.grouping.triton import Grouping
from samovar.kernels.linear.tiles import DotTile
from samovar.kernels.op import OPS, compare, load_ops
from samovar.kernels.triton_launch import SHARED_BYTES

load_ops("cuda")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("impl", "dtype"), [("triton", torch.bfloat16), ("triton_fixed", torch.float16)], ids=str)
def test_the_op_matches_its_reference(impl: str, dtype: torch.dtype) -> None:
    op = OPS["coded_expert_products"]
    assert op.make_examples is not None
    for example in op.make_examples():
        assert compare(op, op.impls[impl].function, example, dtype, "cpu") is None


PLANS = [
    Plan(DotTile(16, 32, 64), DotTile(16, 16, 128), is_sorted=False),
    Plan(DotTile(16, 16, 64), DotTile(16, 64, 64), is_sorted=True),
    Plan(DotTile(64, 64, 128), DotTile(64, 64, 64), is_sorted=True),
]


@pytest.mark.parametrize("how", PLANS, ids=str)
@pytest.mark.parametrize("kind", ["e2m1_16", "int8_16"])
def test_every_plan_computes_everything(how: Plan, kind: str) -> None:
    """Inputs that end within a tile, experts elsewhere on both sides, biases, and a residual."""
    tokens, k, count, inner, hidden = 13, 3, 4, 48, 80
    x, residual = torch.randn(tokens, hidden).half(), torch.randn(tokens, hidden).half()
    ids = torch.rand(tokens, 7).argsort(-1)[:, :k].int()
    weights = torch.rand(tokens, k)
    up, down = random_experts(count, 2 * inner, hidden, kind), random_experts(count, hidden, inner, kind)
    biases = torch.randn(count, 2 * inner).half(), torch.randn(count, hidden).half()
    expected = coded_expert_products(
        x.double(), ids, weights, *up[:2], up[2].double(), *down[:2], down[2].double(), kind, "silu",
        biases[0].double(), biases[1].double(), 0.0, 2, residual.double(),
    )  # fmt: skip
    call = Grouping(x, ids, weights, count, 2, residual)
    got = experts.multiply(how, call, (*up, kind), (*down, kind), ("silu", 0.0), biases)
    # Integers times their scales are rounded to bfloat16, by the interpreter towards zero: 2 ** -7 of sums of about one.
    least = 4e-2 if kind == "int8_16" else 2e-2
    assert bool(((got.double() - expected).abs() < least + 1e-2 * expected.abs()).all())


def test_plans_fit() -> None:
    """On every chip, for every number of tokens, with weights of four and eight bits."""
    for kind in ("e2m1_16", "int8_16"):
        for shared in SHARED_BYTES.values():
            for tokens in (1, 8, 9, 16, 17, 100, 500, 8192):
                how = plan(tokens, 8, 128, kind=kind, shared=shared)
                assert how.is_sorted == (tokens > 16)
                assert how.is_sorted or how.gate_up.tokens >= tokens
                sizes = shared_bytes(how.gate_up, 2, kind), shared_bytes(how.down, 1, kind)
                assert max(sizes) <= shared or how.gate_up.tokens <= 16
    assert all(a.tokens == b.tokens == width for width, (a, b) in TILES.items())


def test_rows_that_cut_bricks_are_refused() -> None:
    up = random_experts(1, 16, 32, "int8_16")
    call = Grouping(torch.zeros(1, 32), torch.zeros(1, 1).int(), torch.ones(1, 1), 1, 0, None)
    with pytest.raises(ValueError, match="experts of 8 rows cut a brick"):
        experts.product(call, TILES[16][0], call.x, (*up, "int8_16"), None, ("silu", 0.0))
