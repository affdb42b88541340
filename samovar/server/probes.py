"""Endpoints for operators: liveness, readiness, version, load, metrics."""

from __future__ import annotations

import msgspec

from samovar.errors import EngineDeadError
from samovar.server.exchange import Exchange
from samovar.server.openai.schema import Load, Readiness, Version
from samovar.server.state import ServingState
from samovar.server.version import version

_TEXT = [(b"content-type", b"text/plain; charset=utf-8")]
_METRICS = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]


async def health(state: ServingState, exchange: Exchange) -> None:
    """200 while the server lives and its engine, if loaded, does too; 503 once the engine is dead or stuck."""
    if state.has_dead_engine:
        raise EngineDeadError("the engine is not running; see the server's log")
    await exchange.reply(200, b"", _TEXT)


async def ready(state: ServingState, exchange: Exchange) -> None:
    """200 from the moment a request would be served; 503 while loading, draining, or dead."""
    status = state.status
    answer = Readiness(status=status, model=state.names[0] if state.names else None)
    await exchange.reply(200 if status == "ready" else 503, msgspec.json.encode(answer))


async def show_version(state: ServingState, exchange: Exchange) -> None:
    """The package's version."""
    await exchange.reply(200, msgspec.json.encode(Version(version=version())))


async def load(state: ServingState, exchange: Exchange) -> None:
    """How many API calls are in progress."""
    await exchange.reply(200, msgspec.json.encode(Load(server_load=state.num_calls)))


async def metrics(state: ServingState, exchange: Exchange) -> None:
    """Prometheus text."""
    if state.metrics is None:
        raise EngineDeadError("the model is still loading; retry when /ready answers 200")
    await exchange.reply(200, state.metrics.render(), _METRICS)
