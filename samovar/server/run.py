"""serve: the whole server process. Socket, HTTP, engine process, text; signals and the end.

Order of life: the port listens; the model loads (/health 200, /ready and requests 503); the ready line; serving; the
first SIGTERM or SIGINT: no new connections or requests, running ones may finish within `shutdown_timeout`, the rest
are ended with an error, the engine process is stopped, exit 0. A second signal exits at once; the engine process dies
with its parent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple, cast

import uvicorn
import uvloop

from samovar.config.engine import EngineConfig
from samovar.config.groups import ServerConfig
from samovar.engine.child import EngineChild
from samovar.engine.door import load_text, make_preparer
from samovar.engine.process_client import ProcessEngineClient
from samovar.hub.locate import find_model
from samovar.server.answers import formats_text
from samovar.server.app import create_app
from samovar.server.grpc.listen import serving_grpc
from samovar.server.limits import LimitedHttpProtocol
from samovar.server.sockets import BACKLOG, address_of, open_private_socket, open_socket
from samovar.server.state import ServingState
from samovar.text.messages import ContentFormat
from samovar.text.prepare import Preparer

LAST_WORDS_SECONDS = 2.0
"""How long ended calls may take to send their last bytes."""
IDLE_SECONDS = 75
"""How long a connection may wait for its next request. Clients and proxies close theirs after 5 to 60 s; a server that
is first may do so just when the next request comes, which then fails."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)

Say = Callable[[str], None]

_logger = logging.getLogger(__name__)


def serve(
    config: EngineConfig, server: ServerConfig, *, say: Say | None = None, child: EngineChild | None = None
) -> int:
    """Serve until a signal; returns the exit code. Raises what stopped the start (`ConfigError`, `CheckpointError`, ...).

    `child` is an engine process that was started for `config` already.
    """
    logging.basicConfig(level=server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listener = open_socket(server)
    private: socket.socket | None = None
    try:
        private = open_private_socket(server)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(config, server, Listeners(listener, private), say or _print, child))
    finally:
        listener.close()
        if private is not None:
            private.close()
        if server.uds is not None:
            Path(server.uds).unlink(missing_ok=True)
    return 0


class Listeners(NamedTuple):
    """The port of the API, and the one of operators if there is one."""

    public: socket.socket
    private: socket.socket | None


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _log_phase(phase: str) -> None:
    _logger.info("engine: %s ...", phase)


async def _serve(
    config: EngineConfig, server: ServerConfig, listeners: Listeners, say: Say, child: EngineChild | None
) -> None:
    client = ProcessEngineClient(
        config,
        engine_timeout=server.engine_timeout,
        on_phase=_log_phase,
        log_level=server.log_level.upper(),
        first=child,
    )
    state = ServingState(server)
    state.keys.check(config.scheduler)
    state.names = state.names or [config.model.model]
    state.stream_interval = config.scheduler.stream_interval

    async def load() -> None:
        started = time.monotonic()
        preparer = await load_model(config, server, client)
        at_end.callback(preparer.close)
        state.attach(client, preparer)
        say(
            ready_text(
                server,
                address_of(listeners.public),
                state.names[0],
                preparer.template is not None,
                time.monotonic() - started,
            )
        )
        say(f"  {formats_text(preparer.template, preparer.formats, server)}")
        if listeners.private is not None:
            say(f"  Admin routes: {address_of(listeners.private)}")
        if grpc_port is not None:
            say(f"  gRPC: {server.grpc_host}:{grpc_port}")

    async with contextlib.AsyncExitStack() as at_end:
        at_end.push_async_callback(client.close)
        grpc_port = await at_end.enter_async_context(serving_grpc(state))
        await run_until_signal(state, listeners.public, load, private=listeners.private)


async def load_model(config: EngineConfig, server: ServerConfig, client: ProcessEngineClient) -> Preparer:
    """Start the engine and, meanwhile, load what text needs."""
    description = await asyncio.to_thread(find_model, config.model)
    starting = asyncio.ensure_future(client.start())
    try:
        text = await asyncio.to_thread(
            load_text,
            config,
            description,
            chat_template=server.chat_template,
            content_format=cast(ContentFormat, server.chat_template_content_format),
        )
        await starting
    finally:
        starting.cancel()
    return make_preparer(config, description, client.info, text, server=server)


async def run_until_signal(
    state: ServingState,
    listener: socket.socket,
    load: Callable[[], Awaitable[None]],
    *,
    private: socket.socket | None = None,
) -> None:
    """Serve HTTP on `listener`, run `load` beside it, and return after a signal and the drain. Raises what `load` raises.

    `private` is the second listener. It is open until the drain is over, as operators may want to see how it goes.
    """
    async with serving_operators(state, private):
        await _run_until_signal(state, listener, load)


async def _run_until_signal(state: ServingState, listener: socket.socket, load: Callable[[], Awaitable[None]]) -> None:
    http = HttpServer(http_config(state, listener))
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, _on_signal, stop, number)
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    loading = asyncio.ensure_future(load())
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({serving, loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if loading.done():
            loading.result()
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        loading.cancel()
        stopping.cancel()
        await asyncio.wait({loading, stopping})
        await drain(state, http, serving)
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _on_signal(stop: asyncio.Event, number: signal.Signals) -> None:
    if stop.is_set():
        os._exit(128 + number)
    _logger.info("%s: finishing what runs; once more to exit at once", number.name)
    stop.set()


async def drain(state: ServingState, http: HttpServer, serving: asyncio.Future[None]) -> None:
    """Take no new connections, let running calls finish within `shutdown_timeout`, then end the rest."""
    state.is_draining = True
    state.drain_deadline = time.monotonic() + state.config.shutdown_timeout
    http.should_exit = True
    if not await _ends(serving, state.config.shutdown_timeout):
        _logger.warning("ending %d calls that did not finish in time", state.end_calls())
        if not await _ends(serving, LAST_WORDS_SECONDS):
            http.force_exit = True
            if not await _ends(serving, LAST_WORDS_SECONDS):
                serving.cancel()
    await asyncio.wait({serving})


async def _ends(task: asyncio.Future[None], seconds: float) -> bool:
    done, _ = await asyncio.wait({task}, timeout=seconds)
    return bool(done)


@contextlib.asynccontextmanager
async def serving_operators(state: ServingState, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve the admin routes on the second listener, if there is one, until the block ends."""
    if listener is None:
        yield
        return
    http = HttpServer(http_config(state, listener, is_private=True))
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    try:
        yield
    finally:
        http.should_exit = True
        if not await _ends(serving, LAST_WORDS_SECONDS):
            http.force_exit = True
            if not await _ends(serving, LAST_WORDS_SECONDS):
                serving.cancel()
        await asyncio.wait({serving})


class HttpServer(uvicorn.Server):
    """uvicorn without its own signal handling, which belongs to `run_until_signal`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals alone."""
        yield


def http_config(state: ServingState, listener: socket.socket, *, is_private: bool = False) -> uvicorn.Config:
    """uvicorn's settings: httptools with our header limits, no access log, no trust in forwarded headers.

    The life of the state goes with the public server.
    """
    return uvicorn.Config(
        create_app(None, None, state.config, state=state, is_private=is_private),
        http=LimitedHttpProtocol,
        ws="none",
        lifespan="off" if is_private else "on",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        root_path=state.config.root_path,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=None,
    )


def ready_text(server: ServerConfig, address: str, model: str, has_template: bool, seconds: float) -> str:
    """The ready line, and a command to try."""
    if has_template:
        path, body = "/v1/chat/completions", '{"messages": [{"role": "user", "content": "Say hello."}]}'
    else:
        path, body = "/v1/completions", '{"prompt": "Once upon a time", "max_tokens": 32}'
    base, words = address, ["curl"]
    if address.startswith("unix:"):
        words += ["--unix-socket", address.removeprefix("unix:")]
        base = "http://localhost"
    words += [base + server.root_path + path, "-H", "Content-Type: application/json"]
    command = shlex.join(words)
    if server.api_key or server.api_keys_file:
        command += ' -H "Authorization: Bearer $SAMOVAR_API_KEY"'
    return f"Samovar is ready: {model} on {address} after {seconds:.1f} s. Try:\n  {command} -d {shlex.quote(body)}"
