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

from samovar.cli.bench import latency, prefill, startup, throughput
from samovar.cli.bench.circumstances import chosen, commit
from samovar.cli.bench.dataset import DatasetOptions, mixed_requests, samples
from samovar.cli.bench.figures import percentile, spread
from samovar.cli.bench.load import Timing, arrivals
from samovar.cli.bench.offline import GenerationOptions, fixed_length, whole_numbers
from samovar.cli.bench.serve import goodput, most_at_once
from samovar.cli.main import main
from samovar.errors import ConfigError
from tests.checkpoints import write_config, write_tokenizer
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
    assert result["circumstances"]["samovar"] and "server_version" in result["circumstances"]
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


def test_a_decode_step_is_what_the_prefill_leaves() -> None:
    """(fastest whole run - fastest prefill) / (tokens - 1), for the whole batch; one token has no step."""
    sizes = {"batch_size": 4, "n": 2, "output_len": 11}
    figures = latency.decode_step([2.5, 3.0], [0.7, 0.5], sizes)
    assert figures["prefill_ms"] == pytest.approx(500)
    assert figures["decode_step_ms"] == pytest.approx(200)
    assert figures["decode_tokens_per_second"] == pytest.approx(40)
    assert "decode_step_ms" not in latency.decode_step([2.5], [0.5], {**sizes, "output_len": 1})
    assert latency.decode_step([0.5], [0.5], sizes)["decode_tokens_per_second"] is None


def test_names_of_the_prefill_figures() -> None:
    figures = prefill.result(2048, [0.3, 0.1, 0.2])
    assert figures["median_ttft_ms"] == pytest.approx(200) and figures["tokens_per_second"] == pytest.approx(10240)


def test_mixed_requests_are_the_same_everywhere() -> None:
    """The lengths and ids of a seed, drawn in this order: length, ids, answer's length. Recorded figures rest on it."""
    rng = random.Random(7)
    expected = []
    for _ in range(20):
        ids = [rng.randrange(10, 5000) for _ in range(rng.randint(100, 1024))]
        expected.append((ids, rng.randint(100, 1024)))
    options = DatasetOptions(dataset_name="mixed", num_prompts=20)
    assert mixed_requests(options, 5000, 7) == expected
    assert all(100 <= s.num_tokens <= 1024 and 100 <= s.output_len <= 1024 for s in samples(options, 7))
    with pytest.raises(ConfigError, match="--mixed-min-len 9 is more than --mixed-max-len 8"):
        mixed_requests(DatasetOptions(dataset_name="mixed", mixed_min_len=9, mixed_max_len=8), 5000, 0)


def test_whole_numbers() -> None:
    assert whole_numbers("--batch-size", ["1", "2k", "3, 4"]) == [1, 2000, 3, 4]
    for bad in ([], ["0"], ["1", "model"], ["-3"]):
        with pytest.raises(ConfigError, match="--batch-size"):
            whole_numbers("--batch-size", bad)


def test_several_answers_are_sampled_and_one_is_not() -> None:
    assert fixed_length(5, 1, GenerationOptions()).is_greedy
    assert fixed_length(5, 3, GenerationOptions()).temperature == 1.0
    assert fixed_length(5, 1, GenerationOptions(temperature=0.5)).temperature == 0.5


def test_the_commit_is_that_of_the_repository(tmp_path: Path) -> None:
    assert commit(tmp_path) is None
    assert commit() is None or len(commit().split("+")[0]) >= 7  # type: ignore[union-attr]


def test_who_was_chosen() -> None:
    line = "linear: triton: needs triton on cuda · torch_column: chosen · reference: always"
    assert chosen(line) == ("linear", "torch_column")
    assert chosen("graphs: batch sizes 1, 2, 4") == ("graphs", "batch sizes 1, 2, 4")


@pytest.fixture(scope="module")
def bare_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with nothing but a config.json."""
    folder = tmp_path_factory.mktemp("bare")
    write_tokenizer(folder)
    write_config(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    return folder


BARE = ["--load-format", "dummy", "--skip-tokenizer-init", "--max-num-seqs", "8"]


@pytest.mark.parametrize(
    ("words", "figures"),
    [
        ("latency --batch-size 1 3 --input-len 5 --output-len 4 --num-iters 2 --num-iters-warmup 1", ["avg_latency"]),
        ("latency --batch-size 2 --n 2 --input-len 5 --output-len 2 --num-iters 1", ["latencies", "percentiles"]),
        ("prefill --input-len 8 16", ["prefill"]),
        ("throughput --num-prompts 5 --dataset-name mixed --mixed-min-len 3 --mixed-max-len 9", ["tokens_per_second"]),
        ("throughput --num-prompts 3 --input-len 6 --output-len 4 --prefix-len 2", ["elapsed_time"]),
    ],
)
def test_a_config_alone_can_be_measured(
    bare_model: Path, tmp_path: Path, words: str, figures: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Random weights, no tokenizer: every figure comes with routes, versions, decisions and memory."""
    name, *rest = words.split()
    file = tmp_path / "figures.json"
    assert main(["bench", name, str(bare_model), *BARE, *rest, "--output-json", str(file)]) == 0
    result = json.loads(file.read_text())
    about = result["circumstances"]
    assert any(line.startswith("attention full") for line in about["routes"])
    assert about["torch"] and about["device"] and about["engine"]["max_num_seqs"] == 8
    assert 0 < about["memory"]["used"] <= about["memory"]["most_used"]
    assert about["memory"]["planned"] == sum(about["memory"]["lines"].values())
    assert all(result[figure] for figure in figures)
    if name == "latency":
        batches = [batch["batch_size"] * batch["n"] for batch in result["batches"]]
        assert batches in ([1, 3], [4]) and result["batches"][0]["latencies"] == result["latencies"]
        assert all(batch["prefill_ms"] > 0 and batch["host_ms_per_step"] > 0 for batch in result["batches"])
    elif name == "prefill":
        assert [one["input_len"] for one in result["prefill"]] == [8, 16]
    else:
        assert result["num_requests"] == (5 if "mixed" in words else 3)
    printed = capsys.readouterr().out
    assert "routes" in printed and "memory" in printed


def test_what_cannot_be_measured_is_refused_before_loading(
    bare_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "prefill", str(bare_model), *BARE, "--input-len", "1024"]) == 2
    assert "--input-len 1024" in capsys.readouterr().err
    words = ["bench", "throughput", str(bare_model), *BARE, "--dataset-name", "custom", "--dataset-path", "x"]
    assert main(words) == 2
    assert "--skip-tokenizer-init" in capsys.readouterr().err
