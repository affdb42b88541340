"""Fills one layer from tensors by name, as the loader would."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from samovar.layers import Layer
from samovar.weights.plan import check_coverage


def fill(layer: Layer, tensors: Mapping[str, torch.Tensor]) -> set[str]:
    """Copy what the layer asks for, let it repack; returns the names it asked for."""
    sources = layer.sources()
    check_coverage([layer], sources)
    for source in sources:
        tensor, (which, count) = tensors[source.name], source.shard
        if source.axis is not None:
            size = tensor.shape[source.axis] // count
            assert size * count == tensor.shape[source.axis], source.name
            tensor = tensor.narrow(source.axis, which * size, size)
        assert (tensor.shape or (1,)) == source.target.shape, (source.name, tensor.shape, source.target.shape)
        source.target.copy_(tensor.view(source.target.shape))
    layer.after_load()
    return {source.name for source in sources}
