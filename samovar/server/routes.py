"""Every endpoint, once: what the router serves, what /openapi.json says, and the closed set of metric labels."""

from __future__ import annotations

from samovar.server import openapi, probes
from samovar.server.admin.routes import ROUTES as ADMIN
from samovar.server.anthropic.routes import ROUTES as ANTHROPIC
from samovar.server.exchange import Exchange
from samovar.server.openai import schema
from samovar.server.openai.routes import ROUTES as OPENAI
from samovar.server.responses.routes import ROUTES as RESPONSES
from samovar.server.routing import HTML, TEXT, Route
from samovar.server.state import ServingState


async def _show_openapi(state: ServingState, exchange: Exchange) -> None:
    await exchange.reply(200, openapi.document(ROUTES))


async def _show_docs(state: ServingState, exchange: Exchange) -> None:
    await exchange.reply(200, openapi.page(ROUTES), [(b"content-type", b"text/html; charset=utf-8")])


async def _go_to_docs(state: ServingState, exchange: Exchange) -> None:
    # Relative, so that it holds behind a proxy that adds a prefix.
    await exchange.reply(307, b"", [(b"location", b"docs")])


PROBES: tuple[Route, ...] = (
    Route(path="/health", summary="Is the server, and its engine, alive?", look=probes.health, answer=TEXT),
    Route(path="/ping", summary="The same as /health.", look=probes.health, answer=TEXT),
    Route(path="/ping", method="POST", summary="The same as /health.", look=probes.health, answer=TEXT),
    Route(path="/ready", summary="Would a request be served now?", look=probes.ready, answer=schema.Readiness),
    Route(path="/version", summary="The version.", look=probes.show_version, answer=schema.Version),
    Route(path="/load", summary="Calls in progress.", look=probes.load, answer=schema.Load),
    Route(path="/metrics", summary="Prometheus metrics.", look=probes.metrics, answer=TEXT),
)
DOCS: tuple[Route, ...] = (
    Route(path="/openapi.json", summary="This description.", look=_show_openapi, is_doc=True),
    Route(path="/docs", summary="This description, to read.", look=_show_docs, answer=HTML, is_doc=True),
    Route(path="/", summary="Leads to /docs.", look=_go_to_docs, answer=HTML, is_doc=True),
)
ROUTES: tuple[Route, ...] = (*OPENAI, *RESPONSES, *ANTHROPIC, *PROBES, *ADMIN, *DOCS)
PRIVATE_ROUTES: tuple[Route, ...] = (*PROBES, *ADMIN)
"""What the second listener serves."""
