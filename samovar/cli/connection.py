"""The server a command talks to: one that runs already, or one started for the command when a model was named."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from samovar.cli.described import fetch
from samovar.cli.http_stream import (
    Address,
    RequestRefused,
    ServerUnreachable,
    authorization,
    get_json,
    request,
)
from samovar.config.engine import ENGINE_GROUPS
from samovar.config.field import Group, field
from samovar.config.flags import to_words
from samovar.config.groups import ModelConfig
from samovar.config.load import Settings
from samovar.config.rules import check_request
from samovar.errors import SamovarError

ENGINE_OPTIONS: tuple[type[Group], ...] = tuple(ENGINE_GROUPS.values())


class ServerOptions(Group):
    """The server to talk to."""

    url: str = field(default="http://127.0.0.1:8000/v1")
    """Address of the API; unix:/path for a Unix socket."""
    model_name: str | None = field(default=None)
    """Model to ask for, if the server has several. Default: its first."""
    api_key: str | None = field(default=None, env="SAMOVAR_API_KEY")
    """Key to send."""


class Connection:
    """A reachable server and the model to ask for."""

    def __init__(self, address: Address, model: str, api_key: str | None) -> None:
        self.address, self.model = address, model
        self.headers = authorization(api_key)

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The events of one streamed request."""
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}} | body
        async with request(self.address, "POST", path, body, self.headers) as answer:
            async for event in (await answer.check()).events():
                yield event

    async def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer to one request that is not streamed."""
        async with request(self.address, "POST", path, {"model": self.model} | body, self.headers) as answer:
            answered: dict[str, Any] = json.loads(await (await answer.check()).body())
            return answered


@contextmanager
def connect(settings: Settings) -> Iterator[Connection]:
    """Use the server at --url; if none is there, or it has another model than the one named, start our own."""
    options = settings[ServerOptions]
    named = settings[ModelConfig].model if "model" in settings.given else None
    try:
        models = asyncio.run(model_names(Address.parse(options.url), options.api_key))
    except ServerUnreachable as error:
        if named is None or "url" in settings.given:
            hint = "start one with 'samovar serve smollm2', or name a model and it is started here"
            raise ServerUnreachable(f"{error}; {hint}") from error
        models = []
    except RequestRefused as error:
        hint = "; give its key with --api-key" if error.status == 401 else ""
        raise RequestRefused(f"{options.url}: {error}{hint}", error.status) from error
    if models and (named is None or named in models or "url" in settings.given):
        yield Connection(Address.parse(options.url), options.model_name or models[0], options.api_key)
        return
    yield from _own_server(settings)


def _own_server(settings: Settings) -> Iterator[Connection]:
    from samovar.cli.local_server import local_server

    check_request(settings.engine)
    fetch(settings[ModelConfig])
    print(f"starting {settings[ModelConfig].model} ...", file=sys.stderr)
    key = settings[ServerOptions].api_key
    with local_server([*engine_words(settings), *(["--api-key", key] if key else [])]) as address:
        at = Address(uds=address.uds, prefix="/v1")
        yield Connection(at, asyncio.run(model_names(at, key))[0], key)


def engine_words(settings: Settings) -> list[str]:
    """The engine's flags that were given, as they stand on the command line of a server of our own."""
    return [word for group in ENGINE_OPTIONS for word in to_words(settings[group], settings.given)]


async def model_names(address: Address, api_key: str | None) -> list[str]:
    """What the server serves. Raises `ServerUnreachable` or `RequestRefused`."""
    answer = await get_json(address, "/models", authorization(api_key))
    names = [str(entry["id"]) for entry in answer.get("data", [])]
    if not names:
        raise SamovarError(f"{address} serves no model")
    return names
