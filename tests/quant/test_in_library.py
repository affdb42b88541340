"""Checkpoints as the CPU library holds them: the very weights that are meant, in the narrowest form that holds them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from samovar.config.checkpoint import describe
from samovar.config.groups import ModelConfig
from samovar.kernels.op import Kernels, Target
from samovar.layers import ColumnLinear, Linear, bind
from samovar.models.decoder import DecoderLM
from samovar.models.registry import build
from samovar.native.matrix import Matrix
from samovar.native.team import Team
from samovar.quant.formats import PLAIN
from samovar.quant.in_library import InLibrary
from samovar.quant.numbers.ggml_blocks import RANGES, encode, narrowest
from samovar.quant.online_in_library import OnlineInLibrary
from samovar.quant.packed import Packed
from samovar.quant.products import Products
from samovar.quant.select import select
from samovar.weights import load as load_module
from samovar.weights.checkpoint import Checkpoint, Piece, open_checkpoint
from samovar.weights.dequantize import dequantize
from samovar.weights.load import load_weights
from tests.models.native_run import team_or_skip
from tests.models.paged_run import placement
from tests.quant.filling import fill
from tests.quant.test_checkpoints import as_tensor, plain
from tests.quant.writers import BY_NAME, GPTQ, Writer, gptq

__all__ = ["plain"]

KERNELS = Kernels(Target("cpu", "", torch.float32), "cpu")


@pytest.fixture(scope="module")
def team() -> Iterator[Team]:
    with team_or_skip(1) as made:
        yield made


def library_format(team: Team, dtype: torch.dtype = torch.bfloat16) -> Packed:
    return Packed(PLAIN[dtype], Products(lambda: team), KERNELS)


# --- blocks


@pytest.mark.parametrize("name", RANGES)
def test_every_integer_in_every_place(name: str) -> None:
    """Each integer of the range at each of the 32 places, against the reader of GGUF files."""
    low, high = RANGES[name]
    levels = torch.stack([torch.arange(low, high + 1, dtype=torch.int8).roll(i) for i in range(32)], 1)
    scale = torch.linspace(-3, 3, len(levels)).half()[:, None]
    blocks = encode(name, levels, scale)
    assert torch.equal(dequantize(name, blocks[:, 0].contiguous()), levels.float() * scale.float())


def test_the_narrowest() -> None:
    assert [narrowest(-8, 7), narrowest(0, 8), narrowest(-9, 0), narrowest(-16, 15)] == ["Q4_0", "Q5_0", "Q5_0", "Q5_0"]
    assert [narrowest(-17, 0), narrowest(-128, 127), narrowest(0, 128)] == ["Q8_0", "Q8_0", None]


# --- layers


EXPECTED = {
    "gptq-3": "Q4_0", "awq": "Q5_0", "auto-round": "Q5_0", "ct-w4": "Q4_0", "ct-w4-asym": "Q5_0", "ct-mxfp4": "Q5_0",
    "mxfp4": "Q5_0",
}  # fmt: skip


def held(
    writer: Writer, team: Team, dtype: torch.dtype, *, is_as_planned: bool = True
) -> tuple[Linear, torch.Tensor, torch.Tensor]:
    """(a layer of two parts, the weight that it holds, the weight that was meant)."""
    rng, tensors, meant = np.random.default_rng(5), dict[str, torch.Tensor](), []
    for name, rows in (("m.gate_proj", 64), ("m.up_proj", 32)):
        written, weight = writer.linear(name, rng.standard_normal((rows, 128)) * 0.1)
        tensors |= {f"{name}.{key}": as_tensor(value) for key, value in written.items()}
        meant.append(torch.from_numpy(np.ascontiguousarray(weight)).float())
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    layer = ColumnLinear(128, {"gate_proj": 64, "up_proj": 32})
    layer.path = "m.gate_up_proj"
    place = select(writer.config, dtype, KERNELS, plain=library_format(team, dtype), shapes=shapes)
    layer.bind(placement(quant_for=place))
    planned = layer.resident_bytes()
    fill(layer, tensors)
    assert isinstance(layer.quant, InLibrary)
    parts = [Matrix(c.format, c.rows, c.cols, c.data, layer.weights) for c in layer.quant.matrices]
    assert (planned >= sum(part.num_bytes for part in parts)) == is_as_planned
    return layer, torch.from_numpy(np.concatenate([part.unpack() for part in parts])), torch.cat(meant)


@pytest.mark.parametrize("name", EXPECTED)
def test_blocks_are_the_weights(name: str, team: Team) -> None:
    """All scales here are float16 or bfloat16 numbers or powers of two, so nothing is rounded."""
    layer, found, meant = held(BY_NAME[name], team, torch.bfloat16)
    assert isinstance(layer.quant, InLibrary) and not layer.quant.note
    assert {format.name for format in layer.quant.formats} == {EXPECTED[name]}
    assert torch.allclose(found, meant, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", [name for name, writer in BY_NAME.items() if writer.inputs is None])
def test_numbers_are_the_weights(name: str, team: Team) -> None:
    """float32 holds all formats; 16 bits round."""
    layer, found, meant = held(BY_NAME[name], team, torch.float32)
    assert isinstance(layer.quant, InLibrary) and "held as F32" in layer.quant.note
    assert torch.allclose(found, meant, rtol=1e-6, atol=1e-8)
    if name not in EXPECTED:
        rounded = held(BY_NAME[name], team, torch.bfloat16)[1]
        assert torch.allclose(rounded, meant.bfloat16().float(), rtol=2**-7, atol=1e-8)


def test_what_config_json_has_wrong(team: Team) -> None:
    """`sym` promises zero points in the middle, and no `desc_act` groups in order. What comes is held all the same."""
    declared = {**GPTQ, "bits": 4, "group_size": 32, "sym": True}
    for linear, format in ((gptq(4, 32), "Q5_0"), (gptq(4, 32, order=True), "BF16")):
        layer, found, meant = held(Writer("wrong", declared, linear), team, torch.bfloat16, is_as_planned=False)
        assert isinstance(layer.quant, InLibrary)
        assert [made.name for made in layer.quant.formats] == [format, format]
        assert torch.allclose(found, meant, rtol=1e-6 if format == "Q5_0" else 2**-7, atol=1e-8)


# --- at load time


@pytest.mark.parametrize(("name", "format"), [("int8", "Q8_0"), ("int4", "Q4_0"), ("mxfp4", "Q5_0"), ("nvfp4", "BF16")])
def test_at_load(name: str, format: str, team: Team) -> None:
    layer = ColumnLinear(96, {"gate_proj": 32, "up_proj": 48}, bias=True)
    layer.path = "m.gate_up_proj"
    layer.bind(placement(quant_for=select(None, torch.bfloat16, KERNELS, plain=library_format(team), online=name)))
    weight = torch.randn(80, 96, generator=torch.Generator().manual_seed(2)) * 0.05
    tensors = {"m.gate_proj.weight": weight[:32], "m.up_proj.weight": weight[32:]}
    tensors |= {"m.gate_proj.bias": torch.ones(32), "m.up_proj.bias": torch.zeros(48)}
    planned = layer.resident_bytes()
    fill(layer, tensors)
    assert isinstance(layer.quant, OnlineInLibrary)
    assert [made.name for made in layer.quant.formats] == [format, format]
    assert planned == sum(tensor.nbytes for tensor in layer.weights.values())
    x = torch.randn(3, 96)
    off = (layer(x) - x @ weight.t()).float() - torch.cat((torch.ones(32), torch.zeros(48)))
    assert float(off.norm() / (x @ weight.t()).norm()) < {"int8": 0.02}.get(name, 0.15)


# --- layer by layer


def model_of(folder: Path, team: Team, online: str) -> tuple[DecoderLM, Checkpoint]:
    description = describe(folder, ModelConfig())
    model = build(description.architecture, description.config)
    bind(model, placement(quant_for=select(None, torch.bfloat16, KERNELS, plain=library_format(team), online=online)))
    return model, open_checkpoint(description)


def test_few_plain_layers_exist_at_a_time(plain: Path, team: Team, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read of a layer is gone once that has repacked, and most layers have not been read then."""
    monkeypatch.setattr(load_module, "LAYERS_AHEAD", 2)
    model, checkpoint = model_of(plain, team, "int4")
    linears = [layer for layer in model.modules() if isinstance(layer, Linear)]
    alive = {layer.path: weakref.ref(layer.weights["weight"]) for layer in linears}
    read: set[str] = set()
    finished: list[str] = []
    copy, repack = Checkpoint.copy, Linear.after_load

    def note_copy(self: Checkpoint, piece: Piece) -> None:
        read.add(piece.name)
        copy(self, piece)

    def note_repack(self: Linear) -> None:
        assert len({name.rpartition(".")[0] for name in read}) <= 3 * (len(finished) + 2) + 8
        repack(self)
        finished.append(self.path)
        gc.collect()
        assert all(alive[path]() is None for path in finished)

    monkeypatch.setattr(Checkpoint, "copy", note_copy)
    monkeypatch.setattr(Linear, "after_load", note_repack)
    with checkpoint:
        load_weights(model, checkpoint)
    assert len(finished) == len(linears) == 8
