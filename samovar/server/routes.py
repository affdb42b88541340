"""Every endpoint, once: what the router serves, what /openapi.json says, and the closed set of metric labels."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from samovar.server import openapi, probes
from samovar.server.exchange import Exchange
from samovar.server.openai import schema
from samovar.server.openai.chat import create_chat_completion
from samovar.server.openai.completions import create_completion
from samovar.server.openai.models import list_models, show_model
from samovar.server.openai.tokenize import detokenize, tokenize
from samovar.server.state import ServingState

TEXT = "text/plain"
HTML = "text/html"
JSON = "application/json"

Look = Callable[[ServingState, Exchange], Awaitable[None]]
Call = Callable[[ServingState, Exchange, bytes], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """One path and method. `call` takes a JSON body of type `body`; `look` takes none. `chunk` is what a stream holds."""

    path: str
    summary: str
    method: str = "GET"
    look: Look | None = None
    call: Call | None = None
    body: type[Any] | None = None
    answer: type[Any] | str = JSON
    chunk: type[Any] | None = None
    is_doc: bool = False


async def _show_openapi(state: ServingState, exchange: Exchange) -> None:
    await exchange.reply(200, openapi.document(ROUTES))


async def _show_docs(state: ServingState, exchange: Exchange) -> None:
    await exchange.reply(200, openapi.page(ROUTES), [(b"content-type", b"text/html; charset=utf-8")])


async def _go_to_docs(state: ServingState, exchange: Exchange) -> None:
    # Relative, so that it holds behind a proxy that adds a prefix.
    await exchange.reply(307, b"", [(b"location", b"docs")])


ROUTES: tuple[Route, ...] = (
    Route(
        path="/v1/chat/completions", method="POST", summary="Answer a conversation.", call=create_chat_completion,
        body=schema.ChatCompletionRequest, answer=schema.ChatCompletion, chunk=schema.ChatCompletionChunk,
    ),
    Route(
        path="/v1/completions", method="POST", summary="Continue one or many prompts.", call=create_completion,
        body=schema.CompletionRequest, answer=schema.Completion, chunk=schema.Completion,
    ),
    Route(path="/v1/models", summary="List the served names.", look=list_models, answer=schema.ModelList),
    Route(path="/v1/models/{model}", summary="Show one served name.", look=show_model, answer=schema.ModelCard),
    Route(
        path="/tokenize", method="POST", summary="Turn a prompt or messages into token ids.", call=tokenize,
        body=schema.TokenizeRequest, answer=schema.TokenizeResponse,
    ),
    Route(
        path="/detokenize", method="POST", summary="Turn token ids into text.", call=detokenize,
        body=schema.DetokenizeRequest, answer=schema.DetokenizeResponse,
    ),
    Route(path="/health", summary="Is the server, and its engine, alive?", look=probes.health, answer=TEXT),
    Route(path="/ping", summary="The same as /health.", look=probes.health, answer=TEXT),
    Route(path="/ping", method="POST", summary="The same as /health.", look=probes.health, answer=TEXT),
    Route(path="/ready", summary="Would a request be served now?", look=probes.ready, answer=schema.Readiness),
    Route(path="/version", summary="The version.", look=probes.show_version, answer=schema.Version),
    Route(path="/load", summary="Calls in progress.", look=probes.load, answer=schema.Load),
    Route(path="/metrics", summary="Prometheus metrics.", look=probes.metrics, answer=TEXT),
    Route(path="/openapi.json", summary="This description.", look=_show_openapi, is_doc=True),
    Route(path="/docs", summary="This description, to read.", look=_show_docs, answer=HTML, is_doc=True),
    Route(path="/", summary="Leads to /docs.", look=_go_to_docs, answer=HTML, is_doc=True),
)  # fmt: skip
