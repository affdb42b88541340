"""Rope of neighbours as rope of halves: weights are sorted, whatever format they have and however heads are split."""

from __future__ import annotations

import pytest
import torch

from samovar.layers import QKVLinear
from samovar.parallel.mesh import Axis
from samovar.quant.base import Dim, QuantMethod, TensorSpec
from tests.models.paged_run import fill, placement

HIDDEN, HEADS, KV_HEADS, DIM = 10, 4, 2, 8
ORDER = {8: [0, 2, 4, 6, 1, 3, 5, 7], 4: [0, 2, 1, 3, 4, 5, 6, 7]}


class InEights(QuantMethod):
    """Rows stand in units of `per`, as packed integers do, or scales of blocks."""

    def __init__(self, per: int) -> None:
        super().__init__(placement().kernels)
        self.tensors = (TensorSpec("weight", torch.float32), TensorSpec("unit", torch.float32, (Dim("out", per),)))

    def multiply(
        self, x: torch.Tensor, weights: dict[str, torch.Tensor], bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x W^T + b."""
        return torch.nn.functional.linear(x, weights["weight"], bias)


def tensors_of(names: dict[str, int], unit: int | None = None) -> dict[str, torch.Tensor]:
    """A checkpoint: weights, biases, and units where a format has them."""
    found = {}
    for name, rows in names.items():
        found |= {f"{name}.weight": torch.randn(rows, HIDDEN), f"{name}.bias": torch.randn(rows)}
        if unit is not None:
            found[f"{name}.unit"] = torch.arange(rows // unit).float()
    return found


PARTS = {"q_proj": HEADS * DIM, "k_proj": KV_HEADS * DIM, "v_proj": KV_HEADS * DIM}


def heads_of(
    layer: QKVLinear, tensors: dict[str, torch.Tensor], x: torch.Tensor, **fields: object
) -> list[torch.Tensor]:
    layer.path = "attn.qkv_proj"
    layer.bind(placement(**fields))
    fill(layer, {f"attn.{name}": tensor for name, tensor in tensors.items()})
    return list(layer(x))


@pytest.mark.parametrize("paired", [8, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_heads_come_sorted_on_every_rank(paired: int, fused: bool) -> None:
    x = torch.randn(3, HIDDEN)
    tensors = tensors_of({"qkv_proj": sum(PARTS.values())} if fused else PARTS)
    sizes = (HIDDEN, HEADS, KV_HEADS, DIM)
    q, k, v = heads_of(QKVLinear(*sizes, bias=True, stored_fused=fused), tensors, x)
    for size in (1, 2, 4):
        for rank in range(size):
            layer = QKVLinear(*sizes, bias=True, stored_fused=fused, num_paired=paired)
            got = heads_of(layer, tensors, x, tp=Axis(rank, size))
            assert not layer.sorts_results
            heads, kv = slice(rank * HEADS // size, (rank + 1) * HEADS // size), rank * KV_HEADS // size
            rows = slice(kv, kv + max(1, KV_HEADS // size))
            torch.testing.assert_close(got[0], q[:, heads][..., ORDER[paired]])
            torch.testing.assert_close(got[1], k[:, rows][..., ORDER[paired]])
            torch.testing.assert_close(got[2], v[:, rows])


@pytest.mark.parametrize(("unit", "late"), [(4, True), (8, False), (16, False)])
def test_rows_that_stand_in_units_are_sorted_as_results(unit: int, late: bool) -> None:
    """Units of whole heads stay where they are; others cannot be taken apart, so what comes out is sorted."""
    x, tensors = torch.randn(3, HIDDEN), tensors_of(PARTS, unit)
    sizes = (HIDDEN, HEADS, KV_HEADS, DIM)
    formats = {"quant_for": lambda path: InEights(unit)}
    q, k, v = heads_of(QKVLinear(*sizes, bias=True), tensors, x, **formats)
    layer = QKVLinear(*sizes, bias=True, num_paired=8)
    got = heads_of(layer, tensors, x, **formats)
    assert layer.sorts_results is late
    kept = torch.cat([tensors[f"{name}.unit"] for name in PARTS])
    assert torch.equal(layer.weights["unit"], kept)
    for found, expected in zip(got, (q[..., ORDER[8]], k[..., ORDER[8]], v), strict=True):
        torch.testing.assert_close(found, expected)


def test_floats_of_8_bits_are_sorted() -> None:
    class Eights(InEights):
        def __init__(self) -> None:
            super().__init__(8)
            self.tensors = (TensorSpec("weight", torch.float8_e4m3fn),)

    layer = QKVLinear(HIDDEN, 1, 1, DIM, num_paired=8)
    layer.path = "attn.qkv_proj"
    layer.bind(placement(quant_for=lambda path: Eights()))
    rows = torch.arange(8.0)[:, None].expand(8, HIDDEN)
    for part in range(3):
        layer.weights["weight"][8 * part : 8 * part + 8].copy_(rows)
    layer.after_load()
    firsts = layer.weights["weight"].float()[:, 0].tolist()
    assert firsts == ORDER[8] + ORDER[8] + list(range(8))


def test_keys_may_be_values() -> None:
    tensors, x = tensors_of({name: PARTS[name] for name in ("q_proj", "k_proj")}), torch.randn(3, HIDDEN)
    layer = QKVLinear(HIDDEN, HEADS, KV_HEADS, DIM, bias=True, has_values=False)
    q, k, v = heads_of(layer, tensors, x)
    assert q.shape == (3, HEADS, DIM) and torch.equal(k, v)
    assert layer.claims() == {f"attn.{name}" for name in tensors}
