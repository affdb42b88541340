"""How many streamed tokens a second the HTTP front end carries, with a scripted engine in place of a model.

The server runs in a child process; this process is the clients: bare sockets that only count chunks. The server's CPU
time, which is printed as well, includes the scripted engine's.

    python -m benchmarks.front_end [--streams 256] [--tokens 200] [--path chat|completions]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

import psutil
import uvloop

from samovar.config.groups import SchedulerConfig, ServerConfig
from samovar.server.run import run_until_signal
from samovar.server.sockets import address_of, open_socket
from samovar.server.state import ServingState
from samovar.text.chat_template import load_chat_template
from samovar.text.prepare import Preparer, limits_from
from samovar.text.tokenizer import load_tokenizer
from tests.server.scripted_engine import ScriptedEngine, engine_facts, write_model

PATHS = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}


async def serve(step_seconds: float) -> None:
    """The server under test: every request says as many tokens as it may."""
    config = ServerConfig(port=0)
    listener = open_socket(config)
    state = ServingState(config)

    async def load() -> None:
        info = engine_facts(max_model_len=4096)
        with tempfile.TemporaryDirectory() as folder:
            model = write_model(Path(folder))
            preparer = Preparer(load_tokenizer(model), load_chat_template(model), limits_from(info), [258])
        limits = SchedulerConfig(max_num_seqs=4096)
        engine = ScriptedEngine(lambda r, i: [70] * 4096, info=info, step_seconds=step_seconds, limits=limits)
        state.attach(engine, preparer)
        print(address_of(listener), flush=True)

    await run_until_signal(state, listener, load)


class Client(asyncio.Protocol):
    """One stream: sends the request, counts chunks, notes when the end marker came."""

    def __init__(self, request: bytes, done: asyncio.Future[int]) -> None:
        self._request = request
        self._done = done
        self._chunks = 0
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count."""
        self._chunks += data.count(b"data: {")
        self._tail = (self._tail + data)[-64:]
        if b"[DONE]" in self._tail and not self._done.done():
            self._done.set_result(self._chunks)

    def connection_lost(self, exc: Exception | None) -> None:
        """A stream without its end is a failure."""
        if not self._done.done():
            self._done.set_exception(ConnectionError(f"stream cut after {self._chunks} chunks: {self._tail!r}"))


async def measure(port: int, streams: int, tokens: int, path: str) -> tuple[int, float]:
    """(chunks received, seconds) of one round."""
    body: dict[str, object] = {"stream": True, "max_tokens": tokens, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "x"}]} if path == "chat" else {"prompt": "x"}
    raw = json.dumps(body).encode()
    head = f"POST {PATHS[path]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    ends: list[asyncio.Future[int]] = [loop.create_future() for _ in range(streams)]
    transports = [
        (await loop.create_connection(lambda end=end: Client(head.encode() + raw, end), "127.0.0.1", port))[0]  # type: ignore[misc]
        for end in ends
    ]
    chunks = sum(await asyncio.gather(*ends))
    seconds = time.perf_counter() - began
    for transport in transports:
        transport.close()
    return chunks, seconds


def main() -> None:
    """Measure three rounds and print each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--path", choices=tuple(PATHS), default="chat")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(asked.step_seconds))
        return
    words = [sys.executable, "-m", "benchmarks.front_end", "--serve", "--step-seconds", str(asked.step_seconds)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline().rsplit(":", 1)[1])
        process = psutil.Process(server.pid)
        try:
            for _ in range(asked.rounds):
                busy = sum(process.cpu_times()[:2])
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    chunks, seconds = runner.run(measure(port, asked.streams, asked.tokens, asked.path))
                rate = asked.streams * asked.tokens / seconds
                cost = (sum(process.cpu_times()[:2]) - busy) / (asked.streams * asked.tokens) * 1e6
                print(
                    f"{asked.streams} streams x {asked.tokens} tokens, {asked.path}: {chunks} chunks, "
                    f"{rate:,.0f} tokens/s, {cost:.1f} us of server CPU a token"
                )
        finally:
            server.terminate()


if __name__ == "__main__":
    main()
