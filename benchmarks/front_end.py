"""How many streamed tokens a second the HTTP front end carries, with a scripted engine in place of a model.

The server runs in a child process; this process is the clients: bare sockets that only count. The server's CPU time,
which is printed as well, includes the scripted engine's. `--profile` adds where it goes.

    python -m benchmarks.front_end [--streams 256] [--tokens 200] [--case chat --case tools ...] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import json
import pstats
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import uvloop

from samovar.config.groups import SchedulerConfig, ServerConfig
from samovar.server.run import run_until_signal
from samovar.server.sockets import address_of, open_socket
from samovar.server.state import ServingState
from samovar.text.chat_template import load_chat_template
from samovar.text.prepare import Preparer, limits_from
from samovar.text.tokenizer import load_tokenizer
from tests.server.scripted_engine import ScriptedEngine, encode, engine_facts, write_model

MESSAGES = [{"role": "user", "content": "x"}]
PARAMETERS = {"type": "object", "properties": {"text": {"type": "string"}}}
CALL = '<tool_call>\n{"name": "write", "arguments": {"text": "%s"}}\n</tool_call>'
MAX_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Case:
    """One endpoint: its body, what is said (%s: words up to the number of tokens), and how its streams end."""

    path: str
    body: dict[str, Any]
    says: str = "%s"
    end: bytes = b"[DONE]"


CASES = {
    "chat": Case("/v1/chat/completions", {"messages": MESSAGES, "ignore_eos": True}),
    "tools": Case(
        "/v1/chat/completions",
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "write", "parameters": PARAMETERS}}]},
        CALL,
    ),
    "completions": Case("/v1/completions", {"prompt": "x", "ignore_eos": True}),
    "responses": Case("/v1/responses", {"input": "x", "store": False}, end=b"event: response.completed"),
    "messages": Case("/v1/messages", {"messages": MESSAGES, "model": "tiny"}, end=b"event: message_stop"),
    "messages-tools": Case(
        "/v1/messages",
        {"messages": MESSAGES, "model": "tiny", "tools": [{"name": "write", "input_schema": PARAMETERS}]},
        CALL,
        b"event: message_stop",
    ),
}  # fmt: skip


def said(case: Case, tokens: int) -> list[int]:
    """What the scripted engine says: one token a byte, and its end is one more."""
    room = tokens - 1 - len(case.says % "")
    return encode(case.says % ("words and " * (room // 10 + 1))[:room])


def request_of(case: Case, tokens: int) -> bytes:
    """The bytes of one request."""
    limit = "max_output_tokens" if case.path == "/v1/responses" else "max_tokens"
    raw = json.dumps(case.body | {"stream": True, limit: tokens}).encode()
    head = (
        f"POST {case.path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    return head.encode() + raw


async def serve(case: Case, tokens: int, step_seconds: float) -> None:
    """The server under test."""
    config = ServerConfig(port=0)
    listener = open_socket(config)
    state = ServingState(config)
    script = said(case, tokens)

    async def load() -> None:
        info = engine_facts(max_model_len=MAX_TOKENS)
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder))
            preparer = Preparer(load_tokenizer(model), load_chat_template(model), limits_from(info), [258])
        limits = SchedulerConfig(max_num_seqs=4096)
        engine = ScriptedEngine(lambda r, i: script, info=info, step_seconds=step_seconds, limits=limits)
        state.attach(engine, preparer)
        print(address_of(listener), flush=True)

    await run_until_signal(state, listener, load)


class Client(asyncio.Protocol):
    """One stream: sends the request, counts bytes and chunks, notes when the end came."""

    def __init__(self, request: bytes, end: bytes, done: asyncio.Future[int]) -> None:
        self._request, self._end, self._done = request, end, done
        self._chunks = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        self._chunks += data.count(b"data: {")
        self._tail = (self._tail + data)[-max(64, len(data)) :]
        if self._end in self._tail and not self._done.done():
            self._done.set_result(self._chunks)

    def connection_lost(self, exc: Exception | None) -> None:
        """A stream without its end is a failure."""
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"stream cut after {self._chunks} chunks: {self._tail[-500:]!r}"))


async def measure(port: int, streams: int, tokens: int, case: Case) -> tuple[int, float]:
    """(chunks received, seconds) of one round."""
    request = request_of(case, tokens)
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    ends: list[asyncio.Future[int]] = [loop.create_future() for _ in range(streams)]
    transports = [
        (await loop.create_connection(lambda end=end: Client(request, case.end, end), "127.0.0.1", port))[0]  # type: ignore[misc]
        for end in ends
    ]
    async with asyncio.timeout(120):
        chunks = sum(await asyncio.gather(*ends))
    seconds = time.perf_counter() - began
    for transport in transports:
        transport.close()
    return chunks, seconds


def run_server(asked: argparse.Namespace) -> None:
    """The child: serve one case until told to stop, and say where the time went if that was asked for."""
    profile = cProfile.Profile()
    if asked.profile:
        profile.enable()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(CASES[asked.case[0]], asked.tokens, asked.step_seconds))
    if asked.profile:
        profile.disable()
        pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(25)


def run_case(name: str, asked: argparse.Namespace) -> None:
    """Measure one case and print each round."""
    words = [sys.executable, "-m", "benchmarks.front_end", "--serve", "--case", name, "--tokens", str(asked.tokens)]
    words += ["--step-seconds", str(asked.step_seconds), *(["--profile"] if asked.profile else [])]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().rsplit(":", 1)[1])
        process = psutil.Process(server.pid)
        try:
            for _ in range(asked.rounds):
                busy = sum(process.cpu_times()[:2])
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    chunks, seconds = runner.run(measure(port, asked.streams, asked.tokens, CASES[name]))
                total = asked.streams * asked.tokens
                cost = (sum(process.cpu_times()[:2]) - busy) / total * 1e6
                print(
                    f"{name:<15} {asked.streams} streams x {asked.tokens} tokens: {chunks:,} chunks, "
                    f"{total / seconds:,.0f} tokens/s, {cost:.1f} ms of server CPU for 1,000 tokens"
                )
        finally:
            server.terminate()


def main() -> None:
    """Measure some rounds of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--case", action="append", choices=tuple(CASES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not 100 <= asked.tokens < MAX_TOKENS:
        parser.error(f"--tokens {asked.tokens}: must be from 100 to {MAX_TOKENS - 1}")
    if asked.serve:
        run_server(asked)
        return
    for name in asked.case or CASES:
        run_case(name, asked)


if __name__ == "__main__":
    main()
