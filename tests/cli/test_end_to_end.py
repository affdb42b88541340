"""The commands with real parts: a tiny random model, a real server, real sockets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samovar.cli.main import main

SMALL = ["--max-num-seqs", "4", "--dtype", "float32"]


def processes_of(text: str) -> list[int]:
    """Ids of processes whose command line names `text`, ours excepted."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if text.encode() in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def test_plan(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny_model), "--json", *SMALL]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["total_bytes"] == sum(plan["lines"].values()) <= plan["budget_bytes"]
    assert plan["max_model_len"] <= (plan["num_blocks"] - 1) * plan["block_size"]
    assert {"weights", "kv cache"} <= plan["lines"].keys()
    assert {d["name"] for d in plan["decisions"]} >= {"max_model_len", "kv_cache_dtype", "threads"}
    assert main(["plan", str(tiny_model), *SMALL]) == 0
    text = capsys.readouterr().out
    assert "kv cache" in text and "LlamaForCausalLM" in text


def test_plan_refuses_what_does_not_fit(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(tiny_model), "--memory", "1MiB"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("samovar: the model needs at least") and len(err.splitlines()) == 1


def test_routes(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["routes", str(tiny_model), *SMALL]) == 0
    text = capsys.readouterr().out
    assert "rms_norm" in text and "attention full" in text and "chosen" in text
    assert main(["routes", str(tiny_model), "--kernel", "rms_norm=nothing"]) == 2
    assert "no implementation 'nothing'" in capsys.readouterr().err


def test_chat_starts_and_stops_its_own_server(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", str(tiny_model), "-q", "Hello", "--max-tokens", "4", "--temperature", "0", *SMALL]) == 0
    first = capsys.readouterr()
    assert "starting" in first.err and processes_of(str(tiny_model)) == []
    assert main(["chat", str(tiny_model), "-q", "Hello", "--max-tokens", "4", "--temperature", "0", *SMALL]) == 0
    assert capsys.readouterr().out == first.out


def test_a_server_that_cannot_start_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["NoSuchModel"], "vocab_size": 5, "max_position_embeddings": 8}'
    )
    assert main(["chat", str(tmp_path), "-q", "Hello", "--load-format", "dummy", "--skip-tokenizer-init"]) == 1
    assert "NoSuchModel" in capsys.readouterr().err


def test_generate(tiny_model: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [{"prompt": f"number {i}", "max_tokens": i + 1, "temperature": 0, "ignore_eos": True} for i in range(12)]
    source.write_text("\n".join(map(json.dumps, lines)))
    assert main(["generate", str(source), "-o", str(target), "--model", str(tiny_model), *SMALL]) == 0
    written = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["usage"]["completion_tokens"] for line in written] == list(range(1, 13))


def test_latency_and_throughput(tiny_model: Path, tmp_path: Path) -> None:
    words = ["--input-len", "8", "--output-len", "4", *SMALL]
    one, two = tmp_path / "latency.json", tmp_path / "throughput.json"
    short = ["--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "1", "--output-json", str(one)]
    assert main(["bench", "latency", str(tiny_model), *words, *short]) == 0
    assert len(json.loads(one.read_text())["latencies"]) == 2
    assert main(["bench", "throughput", str(tiny_model), *words, "--num-prompts", "6", "--output-json", str(two)]) == 0
    figures = json.loads(two.read_text())
    assert figures["num_requests"] == 6 and figures["total_output_tokens"] == 24


def test_serve_is_interrupted_cleanly(tiny_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("w") as out:
        child = subprocess.Popen(
            [sys.executable, "-m", "samovar", "serve", str(tiny_model), "--uds", str(tmp_path / "s"), *SMALL],
            stdout=out,
            stderr=out,
        )
        end = time.monotonic() + 60
        while "Samovar is ready" not in log.read_text() and time.monotonic() < end and child.poll() is None:
            time.sleep(0.05)
        child.send_signal(signal.SIGINT)
        assert child.wait(30) == 0, log.read_text()
    for phase in ("finding the model", "planning memory", "loading weights", "starting"):
        assert log.read_text().count(f"engine: {phase} ...") == 1
    assert "Traceback" not in log.read_text() and processes_of(str(tmp_path)) == []
