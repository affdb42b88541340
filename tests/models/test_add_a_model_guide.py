"""The guide's example is run as printed: it must build, load completely, run, and pass the checks it promises."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.core.cache_spec import CacheSpec, StateSpec, StateTensor
from samovar.layers import ForwardBatch, Layer, Placement, Source, bind
from samovar.layers.recurrent import Recurrent
from samovar.layers.short_conv import sequences_of
from samovar.models import registry
from samovar.weights.load import fill_dummy
from tests.models.family import SMALL
from tests.models.paged_run import PagedRun, fill, placement
from tests.models.transformers_oracle import tokens

GUIDE = Path(__file__).parents[2] / "docs" / "add_a_model.md"


def blocks(text: str) -> list[str]:
    """The guide's code: a family's file, and a layer with a state."""
    found = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(found) == 2
    return found


@pytest.fixture
def teapot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The guide's file as samovar.models.teapot, and its registry line entered."""
    text, file = GUIDE.read_text(), tmp_path / "teapot.py"
    file.write_text(blocks(text)[0])
    spec = importlib.util.spec_from_file_location("samovar.models.teapot", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    spec.loader.exec_module(module)
    line = re.search(r'^ +"(TeapotForCausalLM)": "(teapot:TeapotForCausalLM)",$', text, re.MULTILINE)
    assert line is not None
    monkeypatch.setitem(registry.ARCHITECTURES, *line.groups())


def test_the_example_is_a_working_family(teapot: None) -> None:
    raw = {**SMALL, "rms_norm_eps": 1e-6, "sliding_window": 6, "head_dim": 24, "logit_scale": 0.7}
    raw.pop("tie_word_embeddings")
    model = registry.build("TeapotForCausalLM", raw)
    bind(model, placement())
    fill_dummy(model, 0)
    names = set().union(*(layer.claims() for layer in model.modules() if isinstance(layer, Layer)))
    assert "model.blocks.2.mlp.out.weight" in names and "model.blocks.0.self_attn.q_proj.weight" in names
    assert not any("layers" in name or "down_proj" in name or "lm_head" in name for name in names)
    assert [spec.window for spec in model.cache_specs()] == [6, 6, None]
    run, ids = PagedRun(model, TorchSdpaAttention()), tokens(20, 1)
    (whole,) = run.step([(run.stream(20), ids)])
    stream = run.stream(20)
    chunked = torch.cat([*run.step([(stream, ids[:9])]), *run.step([(stream, ids[9:])])])
    assert whole.shape == (20, 131) and bool(whole.isfinite().all())
    torch.testing.assert_close(chunked, whole, atol=1e-5, rtol=1e-5)


def test_parts_of_fused_layers_are_renamed(teapot: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the section on names says."""
    renames = {"mlp.gate_proj": "mlp.w1", "self_attn.q_proj": "self_attn.wq"}
    monkeypatch.setattr(registry.resolve("TeapotForCausalLM"), "renames", renames)
    model = registry.build("TeapotForCausalLM", {**SMALL, "rms_norm_eps": 1e-6, "sliding_window": 6})
    bind(model, placement())
    names = {source.name for module in model.modules() if isinstance(module, Layer) for source in module.sources()}
    assert {
        f"model.layers.0.{part}.weight" for part in ("mlp.w1", "mlp.up_proj", "self_attn.wq", "self_attn.k_proj")
    } <= names
    assert not any("gate_proj" in name or "q_proj" in name for name in names)


def test_its_checkpoint_names_load(teapot: None) -> None:
    raw = {**SMALL, "rms_norm_eps": 1e-6, "sliding_window": 6}
    model = registry.build("TeapotForCausalLM", raw)
    bind(model, placement())
    shapes: dict[str, torch.Tensor] = {}
    for layer in (module for module in model.modules() if isinstance(module, Layer)):
        for source in layer.sources():
            shapes[source.name] = torch.randn(source.target.shape)
    assert fill(model, shapes) == set(shapes)


def test_the_guide_names_what_exists() -> None:
    """Every layer of its table can be imported, and every class it tells to read is there."""
    layers = importlib.import_module("samovar.layers")
    text = GUIDE.read_text()
    table = text[text.index("## Parts") : text.index("## config.json")]
    for name in re.findall(r"`([A-Z]\w+)[`(]", table):
        assert hasattr(layers, name), name
    for file in re.findall(r"`(\w+\.py)`", text):
        assert (Path(registry.__file__).parent / file).exists(), file


class Smooth(nn.Module):
    """Takes the place of a model with one layer of state: embeds, smooths, and gives what it has as logits."""

    def __init__(self, layer: Recurrent) -> None:
        super().__init__()
        self.embed, self.smoothing = torch.randn(131, 6), layer

    def cache_specs(self) -> list[CacheSpec]:
        return []

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        found: torch.Tensor = self.smoothing(self.embed[batch.token_ids], batch)
        return found

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def test_the_layer_with_a_state_remembers() -> None:
    """As the section on it says: cut anywhere, beside others, from zeros, with the formula's result."""
    names: dict[str, Any] = {"torch": torch, "Source": Source, "Placement": Placement, "ForwardBatch": ForwardBatch}
    names |= {"Recurrent": Recurrent, "StateSpec": StateSpec, "StateTensor": StateTensor, "sequences_of": sequences_of}
    exec(compile(blocks(GUIDE.read_text())[1], "the guide", "exec", dont_inherit=True), names)
    model = Smooth(names["Smoothing"](6))
    bind(model, placement())
    fill(model, {"smoothing.keep": torch.rand(6)})
    run, ids = PagedRun(model, TorchSdpaAttention()), tokens(9, 1)  # type: ignore[arg-type]
    one, other = run.stream(9), run.stream(9)
    (found,) = run.step([(one, ids[:5])])
    found = torch.cat((found, *run.step([(one, ids[5:]), (other, tokens(4, 2))])[:1]))
    keep, expected = model.smoothing.keep, torch.zeros(6)
    for row, token in zip(found, ids, strict=True):
        expected = keep * expected + (1 - keep) * model.embed[token]
        torch.testing.assert_close(row, expected)
