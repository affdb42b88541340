"""Sleep, profiles and server_info of a real engine on a CPU: what is said after waking is what was said before."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from samovar import LLM, SamplingParams
from samovar.errors import ConflictError, ValidationError
from samovar.layers.layer import bind
from samovar.models.registry import build
from samovar.weights import host_copy
from samovar.weights.host_copy import HostCopy
from samovar.weights.load import fill_dummy
from samovar.weights.plan import layers_of
from tests.engine.test_llm import OPTIONS

PROMPTS = ["The capital of France is", "Once upon a time", [5, 6, 7, 8]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder = tmp_path_factory.mktemp("profiles") / "new"
    with LLM(str(tiny_model), **OPTIONS, profiler_dir=str(folder)) as made:
        yield made


def say(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)  # type: ignore[arg-type]
    return [list(output.outputs[0].token_ids) for output in outputs]


def worker_of(llm: LLM) -> Any:
    return llm._engine.executor._worker  # type: ignore[attr-defined]


@pytest.mark.parametrize("level", [0, 1, 2])
def test_awake_again_it_says_the_same(llm: LLM, level: int) -> None:
    """E30, A15: level 1 frees the cache and keeps a CPU's weights where they are, level 2 drops them and reads them again."""
    before, worker = say(llm), worker_of(llm)
    bound = {id(t) for layer in layers_of(worker.model) for t in vars(layer).get("weights", {}).values()}
    for mode in ("abort", "keep"):
        llm.sleep(level=level, mode=mode)
        assert (worker._runner is None) == (level > 0)
        weights = [t for layer in layers_of(worker.model) for t in vars(layer).get("weights", {}).values()]
        assert all((t.device.type == "meta") == (level == 2) for t in weights) and weights
        with pytest.raises(ConflictError, match=r"asleep \(level .\): call wake_up"):
            say(llm)
        llm.wake_up()
        assert say(llm) == before and llm.reset_prefix_cache()
    kept = {id(t) for layer in layers_of(worker.model) for t in vars(layer).get("weights", {}).values()}
    assert (kept == bound) == (level < 2)


def test_a_checkpoint_that_is_gone_can_come_back(tiny_model: Path) -> None:
    """Level 2 reads the files again; while they are away the engine sleeps on, and says why."""
    with LLM(str(tiny_model), **OPTIONS) as llm:
        before = say(llm)
        llm.sleep(level=2)
        weights = next(tiny_model.glob("*.safetensors"))
        away = weights.rename(weights.with_suffix(".away"))
        try:
            with pytest.raises((ConflictError, ValidationError), match="cannot wake up"):
                llm.wake_up()
        finally:
            away.rename(weights)
        llm.wake_up(["weights"])
        llm.wake_up(["kv_cache"])
        assert say(llm) == before


def test_weights_go_to_host_memory_and_back(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What level 1 does on a GPU: the memory is gone meanwhile, every tensor is the object it was, whatever the blocks."""
    worker = worker_of(llm)
    model = build(worker.description.architecture, worker.description.config)
    bind(model, replace(worker._place(worker.device, 512), quant_for=None))  # as on a GPU: plain tensors
    fill_dummy(model, 3)
    sources = [source for layer in layers_of(model) for source in layer.sources()]
    before = [source.target.clone() for source in sources]
    monkeypatch.setattr(host_copy, "BLOCK_BYTES", 10_007)
    copy = HostCopy(model)
    assert all(source.target.untyped_storage().nbytes() == 0 for source in sources)
    assert copy.num_bytes > 100_000
    seen: list[int] = []
    copy.restore(lambda done, total: seen.append(done))
    copy.restore()
    assert seen[-1] == copy.num_bytes
    assert all(torch.equal(source.target, old) for source, old in zip(sources, before, strict=True))
    monkeypatch.setattr(host_copy.cpu, "memory_bytes", lambda: (10**9, 1000))
    with pytest.raises(ConflictError, match="use level 2"):
        HostCopy(model)
    assert all(torch.equal(source.target, old) for source, old in zip(sources, before, strict=True))


def test_profiles(llm: LLM, tmp_path: Path) -> None:
    """C30: a trace that names our layers' kernels; starting twice or stopping twice is a conflict, as is no directory."""
    llm.start_profile("first")
    with pytest.raises(ConflictError, match="under way"):
        llm.start_profile()
    say(llm)
    path = Path(llm._engine.call("stop_profile"))
    assert path.name.startswith("first-") and path.parent.name == "new"
    names = {event.get("name") for event in json.loads(path.read_text())["traceEvents"]}
    assert any("aten::" in str(name) for name in names)
    with pytest.raises(ConflictError, match="no profile"):
        llm.stop_profile()
    with pytest.raises(ValidationError, match="prefix"):
        llm.start_profile("../../etc")


def test_server_info(llm: LLM) -> None:
    """Plain values only: they cross a socket and become JSON."""
    found = llm._engine.call("server_info")
    assert found["state"] == "running" and found["memory"]["most"] >= found["memory"]["now"] > 0
    assert found["config"]["model"]["max_model_len"] == 512 and found["versions"]["torch"] == torch.__version__
    assert {"decisions", "memory_plan", "routes"} < found.keys() and json.dumps(found)
