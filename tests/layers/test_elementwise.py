"""Layers that change every number by itself, and those that depend on positions."""

from __future__ import annotations

import math

import pytest
import torch

from samovar.errors import CheckpointError
from samovar.layers import Activation, Clip, ExpandedIntegral, ForwardBatch, PositionScale, Scalar
from tests.models.paged_run import fill, placement


def test_activations_by_the_names_of_config_files() -> None:
    x = torch.tensor([-2.0, -0.5, 0.0, 0.5, 3.0])
    assert Activation("relu2")(x).tolist() == [0.0, 0.0, 0.0, 0.25, 9.0]
    exact, near = Activation("gelu")(x), Activation("gelu_pytorch_tanh")(x)
    phi = torch.tensor([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in x.tolist()])
    torch.testing.assert_close(exact, x * phi)
    assert 0 < float((exact - near).abs().max()) < 1e-3
    with pytest.raises(CheckpointError, match="activation 'spiral'.*there are gelu, "):
        Activation("spiral")


def test_the_expanded_integral_is_smooth_and_has_the_published_slopes() -> None:
    layer = ExpandedIntegral()
    layer.path = "act_fn"
    layer.bind(placement())
    tensors = {
        "act_fn.alpha_p": torch.tensor([0.3]),
        "act_fn.alpha_n": torch.tensor([-0.4]),
        "act_fn.beta": torch.tensor(0.5),
    }
    assert fill(layer, tensors) == set(tensors)
    assert layer.unread() == {"act_fn.eps"}
    up, down = math.log1p(math.exp(0.3)), 0.5 + math.log1p(math.exp(-0.4))
    x = torch.tensor([2.0, -1.5])
    expected = [up * 4 + 0.5 * 2, (math.expm1(-1.5) + 1.5) * down - 0.5 * 1.5]
    torch.testing.assert_close(layer(x), torch.tensor(expected))
    near = layer(torch.tensor([-1e-4, 1e-4]))
    torch.testing.assert_close(near, torch.tensor([-5e-5, 5e-5]), atol=1e-7, rtol=0)


def test_a_scalar_is_named_like_its_layer() -> None:
    layer = Scalar()
    layer.path = "model.layers.0.layer_scalar"
    layer.bind(placement())
    assert fill(layer, {layer.path: torch.tensor([0.5])}) == {layer.path}
    assert layer(torch.ones(2, 3)).tolist() == [[0.5] * 3] * 2


def test_a_clip_bounds_both_sides() -> None:
    assert Clip(1.5)(torch.tensor([-3.0, 0.2, 2.0])).tolist() == pytest.approx([-1.5, 0.2, 1.5])


def test_queries_grow_with_the_logarithm_of_their_chunk() -> None:
    """As often as a position is a multiple of the length, and once a step for layers that are alike."""
    positions = torch.tensor([0, 6, 7, 13, 14, 700])
    batch = ForwardBatch(positions, positions, positions, ())
    layers = [PositionScale(0.1, 7.0, 1), PositionScale(0.1, 7.0, 1), PositionScale(0.1, 7.0)]
    got = [layer(torch.ones(6, 2, 4), batch)[:, 0, 0] for layer in layers]
    torch.testing.assert_close(got[0], torch.tensor([1 + 0.1 * math.log1p((p + 1) // 7) for p in positions.tolist()]))
    torch.testing.assert_close(got[2], torch.tensor([1 + 0.1 * math.log1p(p // 7) for p in positions.tolist()]))
    assert torch.equal(got[0], got[1]) and len(batch.rope_tables) == 2
