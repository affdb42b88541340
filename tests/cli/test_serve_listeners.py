"""`samovar serve` with all its listeners: a real engine put to sleep and woken, gRPC beside HTTP, one drain for all."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import httpx
import pytest

from samovar.server.grpc.proto import interface
from tests.cli.test_end_to_end import SMALL, processes_of

TYPES = interface()
PROMPT = {"prompt": "Once upon a time there was", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.mark.slow
def test_all_listeners(tiny_model: Path, tmp_path: Path) -> None:
    """Every admin route does to the engine what it says, as clients see it."""
    log = tmp_path / "log"
    words = [
        sys.executable,
        "-m",
        "samovar",
        "serve",
        str(tiny_model),
        "--port",
        "0",
        "--admin-port",
        "0",
        "--grpc-port",
        "0",
    ]
    with log.open("w") as out:
        child = subprocess.Popen([*words, "--served-model-name", str(tmp_path), *SMALL], stdout=out, stderr=out)
    try:
        found = _addresses(child, log)
        with httpx.Client(timeout=60) as http, grpc.insecure_channel(found["grpc"]) as channel:
            _check(http, found["http"], found["admin"])
            generate = channel.unary_stream(
                "/samovar.v1.Inference/Generate",
                request_serializer=lambda message: message.SerializeToString(),
                response_deserializer=TYPES["GenerateReply"].FromString,
            )
            asked = TYPES["GenerateRequest"](text="Once", stopping={"max_tokens": 50, "ignore_eos": True})
            replies = generate(asked)
            next(replies)
            child.send_signal(signal.SIGTERM)
            assert [r.choice.finish.num_tokens for r in replies if r.choice.HasField("finish")] == [50]
        assert child.wait(30) == 0, log.read_text()
        assert "Traceback" not in log.read_text() and processes_of(str(tmp_path)) == []
    finally:
        child.kill()
        child.wait()


def _addresses(child: subprocess.Popen[bytes], log: Path) -> dict[str, str]:
    end = time.monotonic() + 90
    while "gRPC: " not in log.read_text() and time.monotonic() < end and child.poll() is None:
        time.sleep(0.05)
    text = log.read_text()
    patterns = {"http": r"is ready: .* on (\S+) after", "admin": r"Admin routes: (\S+)", "grpc": r"gRPC: (\S+)"}
    found = {name: re.search(pattern, text) for name, pattern in patterns.items()}
    assert all(found.values()), text
    return {name: match[1] for name, match in found.items() if match}


def _check(http: httpx.Client, api: str, admin: str) -> None:
    def text() -> str:
        answer = http.post(api + "/v1/completions", json=PROMPT)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def cached() -> int:
        usage = http.post(api + "/v1/completions", json=PROMPT | {"prompt": "word " * 60}).json()["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    before = text()
    cached()
    assert cached() > 0
    assert http.post(admin + "/reset_prefix_cache").json() == {"success": True} and cached() == 0
    for level in (0, 1, 2):
        assert http.post(admin + "/sleep", params={"level": level}).json() == {"is_sleeping": True}
        assert http.post(api + "/v1/completions", json=PROMPT).status_code == 503
        assert (http.get(api + "/health").status_code, http.get(api + "/ready").status_code) == (200, 503)
        assert http.get(admin + "/is_paused").json() == {"is_paused": True}
        http.post(admin + "/wake_up")
        assert http.get(admin + "/is_sleeping").json() == {"is_sleeping": False} and text() == before
    http.post(admin + "/pause", params={"mode": "wait"})
    assert http.post(api + "/v1/completions", json=PROMPT).status_code == 503
    assert http.post(admin + "/resume").json() == {"is_paused": False} and text() == before
    assert http.post(admin + "/release_kv_cache_memory").json()["freed_bytes"] > 0
    http.post(admin + "/wake_up")
    assert text() == before
    assert http.post(admin + "/stop_profile").status_code == 409
    assert http.get(admin + "/server_info").json()["engine"]["config"]
