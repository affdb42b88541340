"""Layer norms against torch's, and the layers beside them that checkpoints fill in their own way."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import layer_norm

from samovar.layers import AddLayerNorm, HeadsLayerNorm, Layer, LayerNorm, UnitRMSNorm, halves_first
from samovar.parallel.mesh import Axis
from tests.models.paged_run import fill, placement

EPS = 1e-5


def filled(layer: Layer, tensors: dict[str, torch.Tensor], **fields: object) -> None:
    """Bound as `norm`, and loaded."""
    layer.path = "norm"
    layer.bind(placement(**fields))
    assert fill(layer, tensors) == set(tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_is_that_of_torch(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(5, 12).to(dtype), torch.randn(12), torch.randn(12)
    for has_bias, offset in ((True, False), (False, False), (True, True)):
        layer = LayerNorm(12, EPS, bias=has_bias, offset=offset)
        tensors = {"norm.weight": weight, "norm.bias": bias} if has_bias else {"norm.weight": weight}
        filled(layer, tensors, dtype=dtype)
        exact = layer_norm(x.float(), (12,), weight + offset, bias if has_bias else None, EPS)
        got = layer(x)
        assert got.dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 2**-7  # weights and results are rounded to 8 bits each
        torch.testing.assert_close(got.float(), exact, atol=4 * tolerance, rtol=4 * tolerance)


def test_a_small_offset_survives_16_bits() -> None:
    """1 + 2 ** -10 is no bfloat16 number: one is added after the weight is widened."""
    layer = LayerNorm(4, EPS, bias=False, offset=True)
    filled(layer, {"norm.weight": torch.full((4,), 2.0**-10)}, dtype=torch.bfloat16)
    assert layer.weight is not None and layer.weight.tolist() == [1 + 2.0**-10] * 4


def test_a_norm_without_weights_reads_nothing() -> None:
    layer = LayerNorm(8, EPS, has_weight=False)
    filled(layer, {})
    x = torch.randn(3, 8)
    torch.testing.assert_close(layer(x), layer_norm(x, (8,), eps=EPS))


def test_the_sum_is_the_new_residual() -> None:
    layer = AddLayerNorm(8, EPS, bias=False)
    filled(layer, {"norm.weight": torch.randn(8)})
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    normed, total = layer(x, residual)
    assert torch.equal(total, x + residual) and torch.equal(normed, layer(x + residual, None)[0])
    assert layer(x, None)[1] is x


@pytest.mark.parametrize("stored_apart", [False, True])
def test_heads_have_weights_of_their_own(stored_apart: bool) -> None:
    """Each rank holds those of its heads, and all name the same tensors."""
    weight, x = torch.randn(4, 6), torch.randn(3, 4, 6)
    tensors = (
        {f"norm.norms.{i}.weight": row for i, row in enumerate(weight)} if stored_apart else {"norm.weight": weight}
    )
    expected = torch.stack([layer_norm(x[:, i], (6,), weight[i], eps=EPS) for i in range(4)], dim=1)
    parts = []
    for rank in range(2):
        layer = HeadsLayerNorm(4, 6, EPS, stored_apart=stored_apart)
        filled(layer, tensors, tp=Axis(rank, 2))
        parts.append(layer(x[:, 2 * rank : 2 * rank + 2]))
    torch.testing.assert_close(torch.cat(parts, dim=1), expected)


def test_weights_follow_features_into_another_order() -> None:
    order, weight, x = halves_first(6, 4), torch.randn(2, 6), torch.randn(3, 2, 6)
    assert order.tolist() == [0, 2, 1, 3, 4, 5]
    plain, sorted_ = HeadsLayerNorm(2, 6, EPS), HeadsLayerNorm(2, 6, EPS, order=order)
    for layer in (plain, sorted_):
        filled(layer, {"norm.weight": weight})
    torch.testing.assert_close(sorted_(x[..., order]), plain(x)[..., order])


def test_a_norm_without_a_weight_has_mean_square_one() -> None:
    layer = UnitRMSNorm(16, 0.0)
    filled(layer, {})
    torch.testing.assert_close(layer(torch.randn(5, 2, 16)).square().mean(-1), torch.ones(5, 2))
