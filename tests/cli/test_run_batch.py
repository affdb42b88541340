"""`samovar run-batch` with real parts: a tiny random model, real files, a real Ctrl-C."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from samovar.cli.main import main
from tests.cli.test_end_to_end import SMALL, processes_of


def _write(path: Path, count: int, max_tokens: int = 4) -> None:
    body = {"prompt": "Once", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    rows = ({"custom_id": str(i), "method": "POST", "url": "/v1/completions", "body": body} for i in range(count))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_a_batch(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers everything, then has nothing left to do, and begins afresh when told to."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    _write(source, 12)
    with source.open("a") as file:
        file.write("no json\n")
    words = ["run-batch", str(tiny_model), "-i", str(source), "-o", str(target), *SMALL]
    assert main(words) == 1  # one line is wrong
    first = target.read_bytes()
    found = [json.loads(line) for line in first.splitlines()]
    assert [one["custom_id"] for one in found] == [*map(str, range(12)), None]
    assert len({one["response"]["body"]["choices"][0]["text"] for one in found[:12]}) == 1
    assert (
        found[0]["response"]["body"]["usage"]["completion_tokens"] == 4 and found[12]["error"]["code"] == "invalid_json"
    )
    assert "13 lines answered; 1 line of the file ended in an error" in capsys.readouterr().err
    assert main(words) == 1 and target.read_bytes() == first
    err = capsys.readouterr().err
    assert "13 lines answered already" in err and "0 lines answered" in err
    _write(source, 2)
    assert main(words) == 2 and "--overwrite" in capsys.readouterr().err and target.read_bytes() == first
    assert main([*words, "--overwrite"]) == 0 and len(target.read_bytes().splitlines()) == 2


def test_help_lists_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the flags of listeners, which it refuses."""
    assert main(["run-batch", "--help"]) == 0
    out = capsys.readouterr().out
    assert "--concurrency" in out and "--tool-call-parser" in out and "--max-num-seqs" in out
    assert "--port" not in out and "--grpc-port" not in out


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_stopped_and_gone_on(tiny_model: Path, tmp_path: Path, number: signal.Signals) -> None:
    """A signal in the middle leaves whole lines and no process; the same command does the rest."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    _write(source, 200, max_tokens=16)
    words = [
        sys.executable,
        "-m",
        "samovar",
        "run-batch",
        str(tiny_model),
        "-i",
        str(source),
        "-o",
        str(target),
        *SMALL,
        "--concurrency",
        "4",  # not all end at once
    ]
    child = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while (
        time.monotonic() < end
        and child.poll() is None
        and not (target.exists() and target.read_bytes().count(b"\n") > 2)
    ):
        time.sleep(0.01)
    child.send_signal(number)
    _, err = child.communicate(timeout=30)
    assert child.returncode == 128 + number and "goes on from here" in err and "Traceback" not in err, err
    kept = target.read_bytes()
    assert 2 < kept.count(b"\n") < 200 and kept.endswith(b"\n") and processes_of(str(tmp_path)) == []
    assert subprocess.run(words, stderr=subprocess.PIPE, timeout=60).returncode == 0
    assert target.read_bytes().startswith(kept)
    assert [json.loads(line)["custom_id"] for line in target.read_bytes().splitlines()] == [*map(str, range(200))]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "--input-file is missing"),
        (["-i", "https://x/in.jsonl", "-o", "out"], "only local files"),
        (["-i", "-", "-o", "out"], "name one"),
        (["-i", "{in}"], "--output-file is missing"),
        (["-i", "{in}", "-o", "s3://bucket/out"], "only local files"),
        (["-i", "{in}", "-o", "{in}"], "is the input file"),
        (["-i", "{none}", "-o", "{out}"], "cannot be read"),
        (["-i", "{in}", "-o", "{out}", "--port", "9000"], "--port: run-batch opens no port"),
        (["-i", "{in}", "-o", "{out}", "--grpc-port", "9000"], "--grpc-port: run-batch opens no port"),
        (["-i", "{in}", "-o", "{out}", "--concurrency", "0"], "--concurrency must be"),
    ],
)
def test_misuse(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str) -> None:
    """Everything that can be said is said before a model is loaded."""
    (tmp_path / "in").write_text('{"custom_id": "a"}\n')
    names = {name: str(tmp_path / name) for name in ("in", "out", "none")}
    assert main(["run-batch", *(word.format(**names) for word in words)]) == 2
    assert says in capsys.readouterr().err
    assert (tmp_path / "in").read_text() == '{"custom_id": "a"}\n'
