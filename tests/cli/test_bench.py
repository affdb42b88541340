"""The measuring commands: figures against numpy, the load's own clock, names of the JSON fields."""

from __future__ import annotations

import asyncio
import json
import random
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samovar.cli.bench import latency, startup, throughput
from samovar.cli.bench.dataset import DatasetOptions, samples
from samovar.cli.bench.figures import percentile, spread
from samovar.cli.bench.load import Timing, arrivals
from samovar.cli.bench.serve import goodput, most_at_once
from samovar.cli.main import main
from samovar.errors import ConfigError
from tests.cli.fake_api import FakeApi, running


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-9, abs=1e-9)


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40))
def test_spreads_are_numpys(seconds: list[float]) -> None:
    figures, ms = spread("ttft", seconds, [50, 99.9]), np.asarray(seconds) * 1000
    expected = {"mean": ms.mean(), "median": np.median(ms), "std": ms.std(), "p50": np.percentile(ms, 50),
                "p99.9": np.percentile(ms, 99.9)}  # fmt: skip
    assert figures == {f"{k}_ttft_ms": pytest.approx(float(v), rel=1e-6, abs=1e-6) for k, v in expected.items()}


def test_most_at_once() -> None:
    timings = [Timing(start=s, latency=e - s) for s, e in ((0, 10), (1, 3), (3, 5), (4, 6), (20, 21))]
    assert most_at_once(timings) == 3
    assert most_at_once([]) == 0


def test_time_per_token_and_goodput() -> None:
    fast = Timing(ttft=0.1, latency=1.1, output_len=11)
    assert fast.tpot == pytest.approx(0.1)
    slow = Timing(ttft=1.0, latency=9.0, output_len=1)
    assert slow.tpot == 0
    assert goodput([fast, slow, Timing(error="x")], 2.0, {"ttft": 0.2, "tpot": 0.2}) == {"request_goodput": 0.5}
    assert goodput([fast], 2.0, {}) == {}


async def test_arrivals_keep_their_rate() -> None:
    began = time.perf_counter()
    indices = [i async for i in arrivals(20, 200.0, 1.0, random.Random(0))]
    assert indices == list(range(20))
    assert 0.09 < time.perf_counter() - began < 1.5  # 20 at 200 per second take 0.1 s; the upper bound is loose
    assert [i async for i in arrivals(5, float("inf"), 1.0, random.Random(0))] == list(range(5))


def test_random_prompts() -> None:
    options = DatasetOptions(num_prompts=50, input_len=20, output_len=10, range_ratio=0.5, prefix_len=3)
    made = samples(options, seed=1)
    assert made == samples(options, seed=1) != samples(options, seed=2)
    assert {" ".join(s.text.split()[:3]) for s in made}.__len__() == 1
    assert all(
        13 <= s.num_tokens <= 33 and s.num_tokens == len(s.text.split()) and 5 <= s.output_len <= 15 for s in made
    )
    assert len({s.num_tokens for s in made}) > 5


def test_files_of_prompts(tmp_path: Path) -> None:
    share, own = tmp_path / "share.json", tmp_path / "own.jsonl"
    share.write_text(
        json.dumps([{"conversations": [{"value": "Q one"}, {"value": "A"}]}, {"conversations": [{"value": "Q"}]}])
    )
    own.write_text('{"prompt": "a b c", "output_tokens": 7}\n\n{"prompt": "d"}\n')
    options = DatasetOptions(dataset_name="sharegpt", dataset_path=str(share), num_prompts=3)
    assert [s.text for s in samples(options, 0)] == ["Q one"] * 3
    made = samples(DatasetOptions(dataset_name="custom", dataset_path=str(own), num_prompts=2, output_len=9), 0)
    assert sorted((s.text, s.output_len) for s in made) == [("a b c", 7), ("d", 9)]
    with pytest.raises(ConfigError, match="needs --dataset-path"):
        samples(DatasetOptions(dataset_name="custom"), 0)
    with pytest.raises(ConfigError, match="not a sharegpt file"):
        samples(DatasetOptions(dataset_name="sharegpt", dataset_path=str(own)), 0)


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_serve(backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serve", "--backend", backend, "--num-prompts", "12", "--input-len", "9", "--output-len", "3"]
    words += [
        "--max-concurrency",
        "3",
        "--ignore-eos",
        "--goodput",
        "ttft:60000",
        "--metadata",
        "label=x",
        "--save-detailed",
    ]
    words += ["--result-dir", str(tmp_path), "--result-filename", "r.json", "--extra-body.temperature", "0"]
    with running(FakeApi(delay=0.1, cut=50)) as api:
        assert main([*words, "--port", str(api.port)]) == 0
        assert api.most_running == 3 and len(api.seen) == 13
    body = api.seen[-1]
    assert body["ignore_eos"] is True and body["temperature"] == 0 and body["stream_options"] == {"include_usage": True}
    if backend == "openai":
        assert body["prompt"] == list(range(1, 10)) and body["max_tokens"] == 3
    else:
        assert len(body["messages"][0]["content"].split()) == 9 and body["max_completion_tokens"] == 3
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == 12 and result["failed"] == 0 and result["total_output_tokens"] == 36
    assert result["output_throughput"] == pytest.approx(36 / result["duration"])
    assert result["max_concurrent_requests"] <= 3 and result["request_goodput"] == pytest.approx(
        result["request_throughput"]
    )
    assert result["label"] == "x" and result["model_id"] == "fake"
    for metric in ("ttft", "tpot", "itl", "e2el"):
        for figure in ("mean", "median", "std", "p50", "p90", "p99"):
            assert result[f"{figure}_{metric}_ms"] >= 0
    # What a client sees adds up: first token plus the gaps is the whole request.
    for index, gaps in enumerate(result["itls"]):
        assert len(gaps) == 2 and result["output_lens"][index] == 3
        assert result["ttfts"][index] > 0
    assert result["mean_ttft_ms"] + 2 * result["mean_itl_ms"] == pytest.approx(result["mean_e2el_ms"], rel=1e-6)
    assert "time to first token" in capsys.readouterr().out


def test_serve_reports_failures(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "serve", "--num-prompts", "3", "--num-warmups", "0"]
    with running(FakeApi(error_in_stream="it broke")) as api:
        assert main([*words, "--port", str(api.port)]) == 1
    assert "it broke" in capsys.readouterr().out
    with running(FakeApi(error_in_stream="it broke")) as api:
        assert main(["bench", "serve", "--num-prompts", "3", "--port", str(api.port)]) == 1
    assert "the first request failed: it broke" in capsys.readouterr().err
    assert main(["bench", "serve", "--port", "1", "--ready-check-timeout-sec", "0"]) == 1
    assert "nothing answers" in capsys.readouterr().err


def test_names_of_the_offline_figures() -> None:
    assert latency.result([1.0, 2.0, 3.0])["avg_latency"] == 2.0
    assert latency.result([1.0])["percentiles"].keys() == {"10", "25", "50", "75", "90", "99"}
    figures = throughput.result(4, 100, 60, 2.0)
    assert (
        figures["tokens_per_second"] == 80
        and figures["requests_per_second"] == 2
        and figures["total_num_tokens"] == 160
    )
    started = startup.result([(1.0, 2.0)], [])
    assert started["cold_startup_times"] == [1.0] and started["avg_cold_first_token_time"] == 2.0
    assert not any("warm" in key for key in started)


def test_the_first_role_chunk_is_no_token() -> None:
    async def measure() -> Timing:
        from samovar.cli.bench.dataset import Sample
        from samovar.cli.bench.load import Target, send
        from samovar.cli.http_stream import Address

        with running(FakeApi(delay=2.0, cut=60, texts=["a", "b"])) as api:
            target = Target(Address(port=api.port), "/v1/chat/completions", "fake", {}, {})
            return await send(target, Sample("x", 1, 2), None)

    timing = asyncio.run(measure())
    assert len(timing.itl) == 1 and timing.ttft > 0.02 and timing.text == "ab" and not timing.error
