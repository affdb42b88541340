"""The guide's example is run as printed: it must build, load completely, run, and pass the checks it promises."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from samovar.attention.torch_sdpa import TorchSdpaAttention
from samovar.layers import Layer, bind
from samovar.models import registry
from samovar.weights.load import fill_dummy
from tests.models.family_table import SMALL
from tests.models.paged_run import PagedRun, fill, placement
from tests.models.transformers_oracle import tokens

GUIDE = Path(__file__).parents[2] / "docs" / "add_a_model.md"


@pytest.fixture
def teapot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The guide's file as samovar.models.teapot, and its registry line entered."""
    text, file = GUIDE.read_text(), tmp_path / "teapot.py"
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    file.write_text(code)
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
