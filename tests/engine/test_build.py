"""Starting up: phases in their order, and signs of life while one goes on."""

from __future__ import annotations

import logging
import re
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from samovar.config.engine import EngineConfig, with_settings
from samovar.engine import build
from samovar.engine.build import build_engine, once_each
from samovar.worker.worker import Worker

PHASES = ["finding the model", "importing torch", "planning memory", "loading weights", "starting"]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_loading_gives_signs_of_life(load_format: str, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor hears of the load while it goes on, however the model is filled; a list of phases names each once."""
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 64, "threads": 1}
    config = with_settings(EngineConfig(), model=str(tiny_model), load_format=load_format, **settings)
    monkeypatch.setattr(build, "SIGN_SECONDS", 0.0)
    heard: list[str] = []
    engine, _ = build_engine(config, heard.append)
    engine.close()
    assert [phase for phase, _ in groupby(heard)] == PHASES
    assert heard.count("loading weights") > 5
    once: list[str] = []
    listen = once_each(once.append)
    for phase in heard:
        listen(phase)
    assert once == PHASES


def test_signs_are_not_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand pieces loaded at once are no news."""
    monkeypatch.setattr(build, "SIGN_SECONDS", 60.0)
    heard: list[str] = []
    listen = build.signs_of_life("loading weights", heard.append)
    for done in range(1000):
        listen(done, 1000)
    assert not heard


def test_plan_and_decisions_are_logged_before_a_weight_is_read(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One message at info level with every line of the plan and every decision; a screenful at most."""
    reports: list[str] = []
    load = Worker.load

    def record(worker: Worker, *arguments: Any) -> None:
        reports.extend(caplog.messages)
        load(worker, *arguments)

    monkeypatch.setattr(Worker, "load", record)
    caplog.set_level(logging.INFO, logger="samovar.engine.build")
    engine, info = build_engine(with_settings(EngineConfig(), model=str(tiny_model), max_num_seqs=4), lambda _: None)
    engine.close()
    (report,) = reports
    assert len(report.splitlines()) <= 25
    for name, size in info.memory_plan:
        assert re.search(rf"^  {name} +{size / 2**20:,.1f} MiB$", report, re.MULTILINE), name
    assert any(route.startswith("rms_norm: ") for route in info.routes)
    assert len(info.decisions) > 5
    for name, value, reason in info.decisions:
        assert re.search(rf"^  {name} +{re.escape(value)} +{re.escape(reason)}$", report, re.MULTILINE), name
