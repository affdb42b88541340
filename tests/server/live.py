"""A real server on an ephemeral port, in a thread with its own event loop, over a scripted engine."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
import uvloop

from samovar.config.groups import ServerConfig
from samovar.server.run import HttpServer, http_config
from samovar.server.sockets import address_of, open_socket
from samovar.server.state import ServingState
from samovar.text.prepare import Preparer
from tests.server.scripted_engine import ScriptedEngine

T = TypeVar("T")


@dataclass
class LiveServer:
    """A running server: its address, and a way to run things on its loop."""

    url: str
    port: int
    engine: ScriptedEngine
    state: ServingState
    loop: asyncio.AbstractEventLoop

    def on_loop(self, work: Callable[[], T]) -> T:
        """Run `work` on the server's event loop and return its result."""

        async def call() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(10)

    def connect(self) -> socket.socket:
        """A raw TCP connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=20)


@contextmanager
def live_server(
    make_engine: Callable[[], ScriptedEngine], preparer: Preparer, config: ServerConfig | None = None
) -> Iterator[LiveServer]:
    """Run a server until the block ends."""
    settings = config or ServerConfig(port=0)
    listener = open_socket(settings)
    url = address_of(listener)
    box: dict[str, Any] = {}
    started = threading.Event()

    async def main() -> None:
        engine = make_engine()
        state = ServingState(settings)
        state.attach(engine, preparer)
        http = HttpServer(http_config(state, listener))
        box.update(engine=engine, state=state, loop=asyncio.get_running_loop(), http=http)
        serving = asyncio.ensure_future(http.serve(sockets=[listener]))
        while not http.started:
            await asyncio.sleep(0.005)
        started.set()
        await serving
        await engine.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=run, name="live-server")
    thread.start()
    try:
        assert started.wait(10)
        port = int(url.rsplit(":", 1)[1]) if url.startswith("http") else 0
        yield LiveServer(url, port, box["engine"], box["state"], box["loop"])
    finally:
        box["http"].should_exit = True
        thread.join(20)
        listener.close()


@contextmanager
def live_client(
    make_engine: Callable[[], ScriptedEngine], preparer: Preparer, config: ServerConfig | None = None
) -> Iterator[tuple[LiveServer, httpx.Client]]:
    """A server until the block ends, and a client of it."""
    with (
        live_server(make_engine, preparer, config) as own,
        httpx.Client(base_url=own.url, verify=False, timeout=30) as http,
    ):
        yield own, http
