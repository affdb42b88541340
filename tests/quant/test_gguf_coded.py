"""Blocks of GGUF files as codes for `coded_linear`: exact but for scales of bfloat16; the rest becomes numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.kernels.op import Kernels, Target
from samovar.layers import ColumnLinear, Linear, bind
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build
from samovar.quant import gguf_on_gpu, packable
from samovar.quant.gguf_coded import GGUFCoded
from samovar.quant.gguf_on_gpu import GGUFOnGPU
from samovar.quant.mixed import Mixed
from samovar.quant.numbers.gguf_blocks import CODED
from samovar.quant.select import select
from samovar.quant.unquantized import Unquantized
from samovar.weights.checkpoint import open_checkpoint
from samovar.weights.dequantize import dequantize
from samovar.weights.gguf import matrix_types
from samovar.weights.load import load_weights
from tests.models.paged_run import PagedRun, placement
from tests.weights.gguf_files import tiny_model, write_gguf

KERNELS = Kernels(Target("cpu", "", torch.float32), "cpu")
TYPES = list(CODED)


@pytest.fixture(autouse=True)
def kernels_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ops' references stand for kernels."""
    for module in (gguf_on_gpu, packable):
        monkeypatch.setattr(module, "has_kernel", lambda kernels: True)


def random_blocks(type: str, rows: int, inputs: int) -> torch.Tensor:
    """Any codes, with float16 scales and minima of either sign."""
    made, generator = CODED[type], torch.Generator().manual_seed(rows)
    blocks = torch.randint(0, 256, (rows, inputs // made.size, made.bytes), dtype=torch.uint8, generator=generator)
    numbers = 2 if made.has_minimum else 1
    at = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}.get(type, 0)
    half = (torch.randn(*blocks.shape[:2], numbers, generator=generator) * 0.02).half()
    blocks[..., at : at + 2 * numbers] = half.view(torch.uint8).view(*blocks.shape[:2], 2 * numbers)
    return blocks


def layer_of(type: str, parts: dict[str, int], bias: bool = False) -> tuple[ColumnLinear, torch.Tensor]:
    """(a loaded layer, its weight as the reader of GGUF files has it)."""
    types = {f"m.{part}.weight": type for part in parts}
    layer = ColumnLinear(512, parts, bias=bias)
    layer.path = "m.gate_up_proj"
    layer.bind(
        placement(quant_for=select(None, torch.float32, KERNELS, plain=GGUFOnGPU(types, torch.float32, KERNELS)))
    )
    planned, numbers = layer.resident_bytes(), []
    for source, (part, rows) in zip((s for s in layer.sources() if "weight" in s.name), parts.items(), strict=True):
        assert source.name == f"m.{part}.weight"
        blocks = random_blocks(type, rows, 512)
        source.target.copy_(blocks)
        numbers.append(dequantize(type, blocks.flatten(0, 1)).view(rows, 512))
    for source in layer.sources():
        if "bias" in source.name:
            source.target.fill_(0.5)
    layer.after_load()
    assert sum(tensor.nbytes for tensor in layer.weights.values()) == planned
    return layer, torch.cat(numbers)


@pytest.mark.parametrize("type", TYPES)
def test_rows_are_those_of_the_file(type: str) -> None:
    """Where minima are counted from a middle, sums of 16 scales round, of about 70."""
    blocks = random_blocks(type, 24, 512)
    method = GGUFCoded(type, ["l"], KERNELS)
    found = method.rows({"weight": blocks}, 8, 16, 0)
    assert torch.allclose(found, dequantize(type, blocks.flatten(0, 1)).view(24, 512)[8:], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("type", TYPES)
def test_products(type: str) -> None:
    """Scales are off by 2 ** -9 at most, times codes up to eight from the middle; so is what minima are made of."""
    layer, weight = layer_of(type, {"gate_proj": 48, "up_proj": 48}, bias=True)
    x = torch.randn(5, 512, generator=torch.Generator().manual_seed(1))
    expected = x @ weight.t() + 0.5
    bound = (x.abs() @ weight.abs().t()) * 2**-7
    assert bool(((layer(x) - expected).abs() <= bound).all())
    residual = torch.ones_like(expected)
    assert torch.allclose(layer.project_into(x, residual), layer(x) + 1, atol=1e-5)
    gated = layer.quant.norm_gated_multiply(x, torch.ones(512), 1e-6, layer.weights, "silu", layer.bias)
    both = layer.quant.norm_multiply(x, torch.ones(512), 1e-6, layer.weights, layer.bias)
    assert torch.allclose(gated, torch.nn.functional.silu(both[:, :48]) * both[:, 48:], rtol=1e-4, atol=1e-3)


def model_of(path: Path, plain: GGUFOnGPU | None) -> DecoderLM:
    description = describe(path, ModelConfig())
    model = build(description.architecture, description.config)
    bind(model, placement(quant_for=select(None, torch.float32, KERNELS, plain=plain)))
    with open_checkpoint(description, blocks=() if plain is None else plain.coded) as checkpoint:
        load_weights(model, checkpoint)
    return model


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_whole_file(quant: str, family: str, tmp_path: Path) -> None:
    """Rows of heads in another order, a fused tensor, embedding and head as numbers."""
    write_gguf(tmp_path / "q.gguf", tiny_model(family), quant=quant)
    plain = GGUFOnGPU(matrix_types(tmp_path / "q.gguf"), torch.float32, KERNELS)
    found, expected = model_of(tmp_path / "q.gguf", plain), model_of(tmp_path / "q.gguf", None)
    linears = [layer.quant for layer in found.modules() if isinstance(layer, Linear)]
    assert all(isinstance(method, GGUFCoded) for method in linears)
    logits = []
    for model in (found, expected):
        run = PagedRun(model, TorchSdpaAttention())
        logits.append(run.step([(run.stream(9), [5, 9, 77, 130, 41, 100, 8, 3, 60])])[0])
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 2e-2


def test_parts_of_several_types() -> None:
    """As in Q4_K_M: v of another type beside q and k of four."""
    types = {"a.q_proj.weight": "Q4_K", "a.k_proj.weight": "Q4_K", "a.v_proj.weight": "TQ2_0"}
    method = GGUFOnGPU(types, torch.bfloat16, KERNELS).of_parts(list(types))
    assert isinstance(method, Mixed)
    assert [type(part).__name__ for part in method.methods] == ["GGUFCoded", "GGUFCoded", "Unquantized"]
    assert "TQ2_0, for which there is no kernel: held as bfloat16" in method.note


def test_without_kernels_everything_is_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_on_gpu, "has_kernel", lambda kernels: False)
    made = GGUFOnGPU({"m.up_proj.weight": "Q4_0"}, torch.bfloat16, KERNELS)
    method = made.of_parts(["m.up_proj.weight"])
    assert (
        not made.coded
        and isinstance(method, Unquantized)
        and method.note.startswith("Q4_0, for which there is no kernel")
    )


def test_embedding_and_head_are_numbers() -> None:
    types = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"), "Q4_0")
    assert GGUFOnGPU(types, torch.bfloat16, KERNELS).coded == {"model.layers.0.mlp.up_proj.weight"}
