"""`samovar plan` prints the plan of the engine, not one of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from samovar.cli.main import main
from samovar.config.engine import EngineConfig, with_settings
from samovar.core.outputs import EngineInfo
from samovar.engine.build import build_engine
from samovar.models.registry import ARCHITECTURES
from samovar.worker.worker import Worker
from tests.models.family import Family
from tests.models.family_table import FAMILIES

BARE = {
    "num_hidden_layers": 7,
    "max_position_embeddings": 512,
    "tie_word_embeddings": None,
    "num_key_value_heads": None,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
"""What a config.json leaves to its family is left out: heads, windows, layer types, caps, tied weights. Only mixtures are
kept small."""
_STREAMS = {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": 140}
OWN: dict[str, dict[str, Any]] = {
    "ApertusForCausalLM": {"hidden_act": "xielu"},
    "DeepseekV3ForCausalLM": {"n_group": 2, "topk_group": 1},
    "DeepseekV32ForCausalLM": {"n_group": 2, "topk_group": 1},
    "Gemma3nForCausalLM": _STREAMS,
    "Gemma3nForConditionalGeneration": _STREAMS,
    "Llama4ForCausalLM": {"num_experts_per_tok": 1},
    "Llama4ForConditionalGeneration": {"num_experts_per_tok": 1},
    "NemotronHForCausalLM": {"hybrid_override_pattern": "M-M*-M*"},
}
"""What some of them cannot be without, or with."""
ROWS = [*FAMILIES, *(Family(f"{name}-bare", name, BARE | OWN.get(name, {})) for name in ARCHITECTURES)]
SETTINGS = {"load_format": "dummy", "memory": "700MiB", "dtype": "bfloat16", "max_num_batched_tokens": 64, "threads": 1}


def write_config(folder: Path, family: Family) -> None:
    raw = {name: value for name, value in family.raw.items() if value is not None or name == "sliding_window"}
    both = {"architectures": [family.architecture], "rms_norm_eps": 1e-6, "hidden_act": "silu"}
    (folder / "config.json").write_text(json.dumps(both | raw))


def planned(folder: Path, capsys: pytest.CaptureFixture[str], settings: dict[str, Any]) -> dict[str, Any]:
    words = [word for name, value in settings.items() for word in ("--" + name.replace("_", "-"), str(value))]
    assert main(["plan", str(folder), "--json", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def started(folder: Path, settings: dict[str, Any]) -> EngineInfo:
    config = with_settings(EngineConfig(), model=str(folder), **settings)
    engine, info = build_engine(config, lambda phase: None)
    engine.close()
    return info


@pytest.mark.parametrize("family", ROWS, ids=lambda family: family.name)
def test_the_plan_is_the_engines(
    family: Family, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line and every block, before a load: a fixed budget makes the blocks depend on all the other lines."""
    write_config(tmp_path, family)
    with monkeypatch.context() as patch:
        patch.delattr(Worker, "load")
        plan = planned(tmp_path, capsys, SETTINGS)
    info = started(tmp_path, SETTINGS)
    assert plan["lines"] == dict(info.memory_plan)
    assert (plan["num_blocks"], plan["max_model_len"]) == (info.num_blocks, info.max_model_len)
