"""Every format serves the experts of a mixture: expert by expert as stored, and dequantized once where that is needed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from samovar.errors import ConfigError
from samovar.kernels.expert_products import expert_products
from samovar.kernels.op import Kernels, Target
from samovar.kernels.triton_launch import noting
from samovar.layers import Experts, ExpertStorage, Placement
from samovar.quant.select import select
from samovar.quant.stored import Stored
from tests.models.paged_run import placement
from tests.quant.filling import fill
from tests.quant.test_checkpoints import as_tensor
from tests.quant.writers import BY_NAME, Writer

SIZE, COUNT = 128, 2
"""Hidden and inner size, a multiple of every group; and experts."""


def written(writer: Writer) -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """Tensors of a checkpoint, and the weights that each expert has by them."""
    rng = np.random.default_rng(5)
    tensors: dict[str, torch.Tensor] = {}
    meant: list[dict[str, torch.Tensor]] = []
    for expert in range(COUNT):
        meant.append({})
        for part in ("gate_proj", "up_proj", "down_proj"):
            name = f"mlp.experts.{expert}.{part}"
            found, weight = writer.linear(name, rng.standard_normal((SIZE, SIZE)) * 0.1)
            tensors |= {f"{name}.{key}": as_tensor(value) for key, value in found.items()}
            meant[-1][part] = torch.from_numpy(np.ascontiguousarray(weight)).float()
    return tensors, meant


def bound(writer: Writer, tensors: dict[str, torch.Tensor], storage: ExpertStorage) -> Experts:
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    layer = Experts(SIZE, SIZE, COUNT, storage=storage)
    layer.path = "mlp.experts"
    layer.bind(placement(quant_for=select(writer.config, torch.float32, placement().kernels, shapes=shapes)))
    fill(layer, tensors)
    return layer


def check(layer: Experts, meant: list[dict[str, torch.Tensor]], x: torch.Tensor) -> None:
    """Against the weights that are meant; then the same after they became plain."""
    ids = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32)
    routing = torch.tensor([[0.7, 0.3], [0.9, 0.2], [0.0, 1.0]])
    gate_up = torch.stack([torch.cat((each["gate_proj"], each["up_proj"])) for each in meant])
    down = torch.stack([each["down_proj"] for each in meant])
    expected = expert_products(x, ids, routing, gate_up, down, "silu")
    for up, low in layer.pairs:
        assert isinstance(up.quant, Stored) and isinstance(low.quant, Stored)
    torch.testing.assert_close(layer(x, routing, ids), expected, atol=1e-4, rtol=1e-4)
    layer._dequantize()
    layer._stack()
    torch.testing.assert_close(layer(x, routing, ids), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name, writer in BY_NAME.items() if writer.inputs is None])
def test_each_expert_has_linears_of_its_own(name: str) -> None:
    tensors, meant = written(BY_NAME[name])
    check(bound(BY_NAME[name], tensors, ExpertStorage()), meant, torch.randn(3, SIZE))


def as_gpt_oss_has_them() -> tuple[dict[str, torch.Tensor], list[dict[str, torch.Tensor]]]:
    """`written`, blocks and scales of all experts in one tensor each, rows of gate and up in turns."""
    apart, meant = written(BY_NAME["mxfp4"])
    tensors: dict[str, torch.Tensor] = {}
    for key in ("blocks", "scales"):
        gate, up, down = (
            torch.stack([apart[f"mlp.experts.{e}.{part}.weight_{key}"] for e in range(COUNT)])
            for part in ("gate_proj", "up_proj", "down_proj")
        )
        tensors[f"mlp.experts.gate_up_proj_{key}"] = torch.stack((gate, up), 2).flatten(1, 2)
        tensors[f"mlp.experts.down_proj_{key}"] = down
    return tensors, meant


def test_experts_in_one_tensor_as_gpt_oss_has_them() -> None:
    tensors, meant = as_gpt_oss_has_them()
    storage = ExpertStorage(stacked=True, bare=True, transposed=True, interleaved=True)
    check(bound(BY_NAME["mxfp4"], tensors, storage), meant, torch.randn(3, SIZE))


GPU = Kernels(Target("cuda", "sm_90", torch.bfloat16), "cpu")
UNPACKED = ("gptq-4-order", "gptq-4-v2", "gptq-2", "gptq-8-rows", "ct-fp8-block", "bnb-nf4", "bnb-fp4", "torchao-int8")
"""Act-order, groups that no kind has, zero points that leave no byte, and blocks that belong to no row."""


def on_a_gpu(writer: Writer, tensors: dict[str, torch.Tensor], layer: Experts) -> Experts:
    """Loaded as on a GPU, whose kernels run in Triton's interpreter."""
    pytest.importorskip("triton")
    shapes = {key: tuple(value.shape) for key, value in tensors.items()}
    layer.path = "mlp.experts"
    quant_for = select(writer.config, torch.bfloat16, GPU, shapes=shapes)
    layer.bind(Placement(dtype=torch.bfloat16, device=torch.device("cpu"), kernels=GPU, quant_for=quant_for))
    announced = layer.resident_bytes()
    fill(layer, tensors)
    if layer.coded is not None:
        assert sum(tensor.nbytes for tensor in layer.coded_tensors) == announced
    return layer


def error_on_a_gpu(layer: Experts, meant: list[dict[str, torch.Tensor]]) -> float:
    torch.manual_seed(0)
    ids = torch.tensor([[0, 1], [1, 0], [1, 0]], dtype=torch.int32)
    routing, x = torch.tensor([[0.7, 0.3], [0.9, 0.2], [0.0, 1.0]]), torch.randn(3, SIZE).bfloat16()
    gate_up = torch.stack([torch.cat((each["gate_proj"], each["up_proj"])) for each in meant])
    down = torch.stack([each["down_proj"] for each in meant])
    expected = expert_products(x.float(), ids, routing, gate_up, down, "silu")
    return float((layer(x, routing, ids).float() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", BY_NAME)
def test_experts_on_a_gpu(name: str) -> None:
    """What the checkpoint means, within bfloat16 of activations, scales and decoded weights; packed where that is possible."""
    tensors, meant = written(BY_NAME[name])
    layer = on_a_gpu(BY_NAME[name], tensors, Experts(SIZE, SIZE, COUNT))
    assert (layer.coded is None) == (name in UNPACKED)
    assert error_on_a_gpu(layer, meant) < 1.6e-2


def test_gpt_oss_on_a_gpu() -> None:
    """Rows in turns come apart before they are packed."""
    tensors, meant = as_gpt_oss_has_them()
    storage = ExpertStorage(stacked=True, bare=True, transposed=True, interleaved=True)
    layer = on_a_gpu(BY_NAME["mxfp4"], tensors, Experts(SIZE, SIZE, COUNT, storage=storage))
    assert layer.coded is not None and error_on_a_gpu(layer, meant) < 1.6e-2


def test_a_gpu_gets_plain_experts_or_says_what_it_cannot_do() -> None:
    """Without memory: as kernels are prepared."""
    pytest.importorskip("triton")
    kernels = Kernels(Target("cuda", "sm_90", torch.bfloat16), "meta")
    place = Placement(dtype=torch.bfloat16, device=torch.device("meta"), kernels=kernels)
    layer = Experts(SIZE, SIZE, COUNT)
    layer.path = "mlp.experts"
    layer.bind(replace(place, quant_for=select(BY_NAME["gptq-4-order"].config, torch.bfloat16, kernels)))
    expected = 2 * 3 * COUNT * SIZE * SIZE
    assert layer.resident_bytes() == expected
    x, ids = (
        torch.empty(3, SIZE, dtype=torch.bfloat16, device="meta"),
        torch.empty(3, 2, dtype=torch.int32, device="meta"),
    )
    routing = torch.empty(3, 2, device="meta")
    with noting() as notes:
        assert layer(x, routing, ids).shape == (3, SIZE)
    assert {launch.name for launch in notes.launches.values()} == {"block_kernel", "sum_kernel"}
    with pytest.raises(ConfigError, match=r"experts of the format Online cannot .* --quantization"):
        layer.bind(replace(place, quant_for=select(None, torch.bfloat16, kernels, online="int8")))
