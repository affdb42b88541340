"""A server's life: listening before loading, ready, draining, the second signal; sockets; what it imports."""

from __future__ import annotations

import os
import re
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from samovar.config.groups import ServerConfig
from samovar.errors import ConfigError
from samovar.server.run import ready_text
from samovar.server.sockets import address_of, open_socket
from samovar.text.prepare import Preparer
from tests.server.live import live_server
from tests.server.scripted_engine import ScriptedEngine, saying
from tests.server.wire import CHAT, HELLO, chunks_of, error_of

ROOT = Path(__file__).parents[2]

PATIENCE = 60
"""Seconds an answer may take on a busy machine."""


@contextmanager
def process(shutdown_timeout: float = 30, load_seconds: float = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A scripted server process and its URL."""
    words = [sys.executable, "-m", "tests.server.serve_scripted", str(shutdown_timeout), str(load_seconds)]
    child = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        yield child, re.findall(r"http\S+", child.stdout.readline())[0]
    finally:
        child.kill()
        child.communicate()


def wait_ready(url: str) -> None:
    for _ in range(500):
        try:
            if httpx.get(url + "/ready", timeout=PATIENCE).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.02)
    raise AssertionError("not ready")


def wait_refused(url: str) -> None:
    """Wait until nobody listens any more: the drain has begun."""
    for _ in range(500):
        try:
            httpx.get(url + "/health", timeout=PATIENCE)
        except httpx.TransportError:
            return
        time.sleep(0.02)
    raise AssertionError("still listening")


def test_before_and_after_loading() -> None:
    """The port answers while the model loads: /health 200, everything else 503 with Retry-After; then the ready line."""
    with process(load_seconds=4.0) as (child, url):
        assert httpx.get(url + "/health", timeout=PATIENCE).status_code == 200
        early = httpx.get(url + "/ready", timeout=PATIENCE)
        assert (early.status_code, early.json()["status"]) == (503, "starting")
        for answer in (
            httpx.post(url + CHAT, json={"messages": HELLO}, timeout=PATIENCE),
            httpx.get(url + "/metrics", timeout=PATIENCE),
            httpx.get(url + "/v1/models", timeout=PATIENCE),
        ):
            assert error_of(answer)["code"] == 503 and answer.headers["retry-after"]
        wait_ready(url)
        assert child.stdout is not None and "Samovar is ready: tiny" in child.stdout.readline()
        command = shlex.split(child.stdout.readline())
        assert command[0] == "curl"
        answer = httpx.post(
            command[1],
            content=command[command.index("-d") + 1],
            headers={"content-type": "application/json"},
            timeout=PATIENCE,
        )
        assert answer.status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_drain(number: signal.Signals) -> None:
    """D47: after a signal the running stream ends as usual, new connections are refused, and the exit code is 0."""
    with process() as (child, url):
        wait_ready(url)
        with httpx.stream("POST", url + CHAT, json={"messages": HELLO, "stream": True, "max_tokens": 150}) as running:
            parts = running.iter_raw()
            received = next(parts)
            child.send_signal(number)
            wait_refused(url)
            received += b"".join(parts)
        assert chunks_of(received)[-1]["choices"][0]["finish_reason"] == "length"
        assert child.wait(10) == 0


def test_drain_has_an_end() -> None:
    """What does not finish within the timeout is ended with an error: a frame in a stream, 503 otherwise; exit 0."""
    with process(shutdown_timeout=0.3) as (child, url):
        wait_ready(url)
        with httpx.stream("POST", url + CHAT, json={"messages": HELLO, "stream": True}) as running:
            parts = running.iter_raw()
            received = next(parts)
            began = time.monotonic()
            child.send_signal(signal.SIGTERM)
            received += b"".join(parts)
        assert chunks_of(received)[-1]["error"]["code"] == 503
        assert child.wait(10) == 0 and time.monotonic() - began < 3


def test_second_signal_exits_at_once() -> None:
    """A second signal does not wait for anything."""
    with process() as (child, url):
        wait_ready(url)
        with httpx.stream("POST", url + CHAT, json={"messages": HELLO, "stream": True}) as running:
            parts = running.iter_raw()
            next(parts)
            child.send_signal(signal.SIGINT)
            wait_refused(url)
            assert child.poll() is None
            child.send_signal(signal.SIGINT)
            assert child.wait(5) == 128 + signal.SIGINT


def test_signal_while_loading() -> None:
    """A signal before the model is loaded ends the process in good order."""
    with process(load_seconds=60) as (child, url):
        assert httpx.get(url + "/health", timeout=PATIENCE).status_code == 200
        child.send_signal(signal.SIGTERM)
        assert child.wait(10) == 0


def test_failing_to_load() -> None:
    """An error of the start comes out of the server, after its port is closed."""
    with process(load_seconds=-1) as (child, _):
        _, errors = child.communicate(timeout=20)
        assert child.returncode == 1 and "cannot load" in errors


def test_port_in_use() -> None:
    """A taken port is one line that names the address."""
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigError, match="cannot listen"):
        open_socket(ServerConfig(port=taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="no-such-host"):
        open_socket(ServerConfig(host="no-such-host.invalid"))


def test_unix_socket(preparer: Preparer, tmp_path: Path) -> None:
    """--uds serves on the path, replaces a stale socket file, and leaves other files alone."""
    path = tmp_path / "api"
    config = ServerConfig(uds=str(path))
    for _ in range(2):
        with live_server(lambda: ScriptedEngine(saying("abc")), preparer, config) as own:
            assert own.url == f"unix:{path}" and stat.S_ISSOCK(os.stat(path).st_mode)
            with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://x") as http:
                assert http.post(CHAT, json={"messages": HELLO}).status_code == 200
            with pytest.raises(ConfigError):
                open_socket(config)
    other = tmp_path / "file"
    other.write_text("mine")
    with pytest.raises(ConfigError):
        open_socket(ServerConfig(uds=str(other)))
    assert other.read_text() == "mine"


def test_ready_text_fits_the_server() -> None:
    """The command to try knows keys, Unix sockets, prefixes and models without a template."""
    assert '-H "Authorization: Bearer $SAMOVAR_API_KEY"' in ready_text(
        ServerConfig(api_key=["k"]), "http://h:1", "m", True, 1
    )
    assert "--unix-socket /tmp/x http://localhost/v1/chat" in ready_text(ServerConfig(), "unix:/tmp/x", "m", True, 1)
    assert "http://h:1/p/v1/completions" in ready_text(ServerConfig(root_path="/p"), "http://h:1", "m", False, 1)


def test_addresses() -> None:
    """A wildcard address is shown as one that a client can use."""
    with open_socket(ServerConfig(host="0.0.0.0", port=0)) as listener:
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+", address_of(listener))


def test_imports() -> None:
    """The server process loads neither torch nor transformers."""
    code = "import sys, samovar.server.run; print([m for m in ('torch', 'transformers', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
