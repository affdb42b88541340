"""create_app: the ASGI application. Router, errors, request ids, life cycle, and the layers around them.

Paths are matched by one rule (`auth.routed_path`, then `routing.Router`), which the key check shares.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from samovar.config.groups import ServerConfig
from samovar.engine.client import EngineClient
from samovar.engine.metrics import Rates
from samovar.server.auth import RequireKey, check_operator, routed_path
from samovar.server.calls import run_call
from samovar.server.error_shapes import encode_error_for
from samovar.server.exchange import Exchange
from samovar.server.limits import BodyLimit
from samovar.server.problems import ClientGoneError
from samovar.server.routes import PRIVATE_ROUTES, ROUTES
from samovar.server.routing import Route, Router, WrongMethodError
from samovar.server.state import ServingState
from samovar.text.prepare import Preparer

STATS_SECONDS = 10.0
"""How often the statistics line is logged while there is something to say."""
ALLOWED_HEADERS = ("authorization", "content-type", "x-api-key", "x-request-id", "anthropic-version", "anthropic-beta")
"""What pages of an allowed origin may send."""

_logger = logging.getLogger(__name__)


def create_app(
    client: EngineClient | None,
    preparer: Preparer | None,
    config: ServerConfig,
    *,
    state: ServingState | None = None,
    is_private: bool = False,
) -> ASGIApp:
    """The application over an engine that is ready, or over a `state` that someone attaches one to later.

    Until then /health answers 200, /ready and everything that needs the model 503. `is_private` makes the application
    of the second listener, which has the admin routes and the probes only.
    """
    state = ServingState(config) if state is None else state
    if client is not None and preparer is not None:
        state.attach(client, preparer)
    app: ASGIApp = Application(state, is_private=is_private)
    app = BodyLimit(app, config.max_body_bytes)
    app = RequireKey(app, state.keys, is_private=is_private)
    if config.allowed_origins and not is_private:
        app = CORSMiddleware(
            app,
            allow_origins=config.allowed_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=ALLOWED_HEADERS,
        )
    return app


class Application:
    """Finds the route, runs it, and turns every failure into an answer."""

    def __init__(self, state: ServingState, *, is_private: bool = False) -> None:
        self._state = state
        self._is_private = is_private
        routes = PRIVATE_ROUTES if is_private else ROUTES
        self._router = Router(route for route in routes if not (route.is_doc and state.config.disable_docs))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            await self._answer(Exchange(scope, receive, send))
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})

    async def _answer(self, exchange: Exchange) -> None:
        state, started = self._state, time.monotonic()
        self._note_request_id(exchange)
        label = "other"
        try:
            route = self._find(exchange)
            label = route.path
            if route.call is not None:
                exchange.check_json()
                body = await exchange.read_body()
                await run_call(state, exchange, route.call(state, exchange, body))
            elif route.look is not None:
                await route.look(state, exchange)
        except (ClientGoneError, ConnectionResetError):
            exchange.status = exchange.status or 499
        except Exception as error:  # the boundary of a request: the client is told, the server goes on
            if exchange.is_started:
                raise
            status, problem = encode_error_for(routed_path(exchange.scope), error)
            if status == 503:
                exchange.extra_headers.append((b"retry-after", b"1"))
            await exchange.reply(status, problem)
        finally:
            self._note_answer(exchange, label, time.monotonic() - started)

    def _find(self, exchange: Exchange) -> Route:
        scope = exchange.scope
        try:
            route, values = self._router.find(scope["method"], routed_path(scope))
        except WrongMethodError as error:
            exchange.extra_headers.append((b"allow", error.allowed.encode()))
            raise
        if route.is_admin:
            check_operator(scope, self._state.keys, is_private=self._is_private)
        scope["path_params"] = values
        return route

    def _note_request_id(self, exchange: Exchange) -> None:
        """Echo the client's id, or a new one, if the server was told to; long or odd ids are replaced."""
        if not self._state.config.enable_request_id_headers:
            return
        wanted = exchange.header(b"x-request-id") or ""
        is_usable = 0 < len(wanted) <= 128 and all("!" <= c <= "~" for c in wanted)
        request_id = wanted if is_usable else uuid.uuid4().hex
        exchange.scope["samovar.request_id"] = request_id
        exchange.extra_headers.append((b"x-request-id", request_id.encode()))

    def _note_answer(self, exchange: Exchange, label: str, seconds: float) -> None:
        state, method = self._state, exchange.scope["method"]
        if state.metrics is not None:
            state.metrics.count_http(label, method, exchange.status)
        if state.config.enable_log_requests:
            _logger.info("%s %s %d %.1f ms", method, label, exchange.status, seconds * 1000)

    # --- life cycle

    async def _live(self, receive: Receive, send: Send) -> None:
        ticker: asyncio.Task[None] | None = None
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                ticker = asyncio.ensure_future(log_statistics(self._state))
                await send({"type": "lifespan.startup.complete"})
            elif message["type"] == "lifespan.shutdown":
                if ticker is not None:
                    ticker.cancel()
                self._state.close()
                await send({"type": "lifespan.shutdown.complete"})
                return


async def log_statistics(state: ServingState) -> None:
    """Log one line of rates every `STATS_SECONDS`, at debug level while nothing happens."""
    rates: Rates | None = None
    while True:
        await asyncio.sleep(STATS_SECONDS)
        if state.metrics is None:
            continue
        if rates is None:
            rates = Rates(state.metrics, time.monotonic() - STATS_SECONDS)
        text, is_busy = rates.line(time.monotonic())
        _logger.log(logging.INFO if is_busy else logging.DEBUG, text)
