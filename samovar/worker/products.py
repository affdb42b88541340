"""Products run once before the first step, so that no step waits for the library's kernels to be loaded.

cuBLAS has many kernels for one product and picks one by the number of rows. The driver loads a kernel when it is first
launched, and waits for the device to become idle to do so: on a server whose every step has another number of tokens,
that is a pause as long as a step, again and again. Measured on an H200: dozens in the first ten seconds.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from samovar.layers.embedding import LMHead
from samovar.layers.linear import Linear, RowLinear

ROWS = (*range(64, 1024, 64), *range(1024, 2304 + 1, 128), 3072, 4096, 6144, 8192)
"""Tokens of a step at which the choice of a kernel may change."""
OWN_ROWS = 32
"""Up to so many rows the kernels are ours, and compiled ahead."""


@torch.inference_mode()
def run_products(model: nn.Module, max_rows: int, sampled: Sequence[int], max_logits: int) -> int:
    """Queue one product for each size of weight and number of rows; returns how many.

    `max_rows` are the most tokens of a step; `sampled` are the numbers of rows that steps sample from, of which at most
    `max_logits` go through the head at once.
    """
    sizes = sorted({size for size in (*ROWS, *sampled) if OWN_ROWS < size <= max_rows})
    head_sizes = sorted({min(size, max_logits) for size in sampled if size > OWN_ROWS})
    count = 0
    for layer in _distinct(model):
        for size in head_sizes if isinstance(layer, LMHead) else sizes:
            _run(layer, size)
            count += 1
    return count


def _run(layer: Linear | LMHead, size: int) -> None:
    """The product as the model makes it: those in front of a residual are added to it."""
    if isinstance(layer, LMHead):
        table = layer.table
        where = next(iter(table.weights.values())).device
        layer(torch.zeros(size, layer.dim, dtype=table.compute_dtype, device=where))
        return
    dtype, weight = layer.compute_dtype, next(iter(layer.weights.values()))
    x = torch.zeros(size, layer.num_inputs, dtype=dtype, device=weight.device)
    if isinstance(layer, RowLinear):
        layer.project_into(x, x.new_zeros(size, sum(layer.rows)))
    else:
        layer.project(x)


def _distinct(model: nn.Module) -> list[Linear | LMHead]:
    """One layer of each size."""
    found: dict[object, Linear | LMHead] = {}
    for layer in model.modules():
        if isinstance(layer, LMHead):
            found.setdefault(LMHead, layer)
        elif isinstance(layer, Linear):
            key = (type(layer), type(layer.quant), layer.has_bias, *(tuple(w.shape) for w in layer.weights.values()))
            found.setdefault(key, layer)
    return list(found.values())
