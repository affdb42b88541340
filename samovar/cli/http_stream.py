"""A small HTTP/1.1 client over asyncio: one request per connection, answers read as they arrive. TCP, TLS or Unix socket.

Enough for the commands that talk to a server, and light enough to measure one: a library's overhead would be in the
figures. Knows JSON bodies and server-sent events.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from samovar.errors import ConfigError, SamovarError


class ServerUnreachable(SamovarError):
    """Nothing answers at the address, or the connection broke."""


class RequestRefused(SamovarError):
    """The server answered with an error; `status` is its HTTP status."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: host and port, or the path of a Unix socket. `prefix` stands before every path."""

    host: str = "127.0.0.1"
    port: int = 8000
    prefix: str = ""
    is_tls: bool = False
    uds: str | None = None

    @classmethod
    def parse(cls, url: str) -> Address:
        """From `http://host:port/prefix`, `https://...` or `unix:/path`. Raises `ConfigError`."""
        if url.startswith("unix:"):
            return cls(uds=url.removeprefix("unix:"))
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(f"--url {url}: the port is not a number in 0..65535") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url}: write http://host:port/v1, https://... or unix:/path")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 80), parts.path.rstrip("/"), is_tls)

    def __str__(self) -> str:
        if self.uds is not None:
            return f"unix:{self.uds}"
        return f"http{'s' if self.is_tls else ''}://{self.host}:{self.port}{self.prefix}"


@dataclass(slots=True)
class Answer:
    """An answer whose head has been read; the body comes through `pieces`, `body` or `events`, once."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader = field(repr=False)

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it arrives."""
        if "chunked" in self.headers.get("transfer-encoding", ""):
            while count := int((await self.reader.readline()).split(b";")[0] or b"0", 16):
                yield await self.reader.readexactly(count)
                await self.reader.readexactly(2)
            return
        left = int(self.headers["content-length"]) if "content-length" in self.headers else None
        while left != 0:
            piece = await self.reader.read(65536 if left is None else min(left, 65536))
            if not piece:
                break
            left = None if left is None else left - len(piece)
            yield piece
        if left:
            raise ServerUnreachable(f"the connection closed {left} bytes before the end of the answer")

    async def body(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.pieces()])

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The JSON of each server-sent event up to `[DONE]`. Raises `RequestRefused` for an error in the stream."""
        rest, is_done = b"", False
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                text = line.strip().removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                # The rest of the body is read to its end: the request is over when the server says so.
                is_done = is_done or text == b"[DONE]"
                if text and not is_done:
                    event: dict[str, Any] = json.loads(text)
                    if "error" in event:
                        raise RequestRefused(*_problem(200, text))
                    yield event

    async def check(self) -> Answer:
        """This answer if its status is 2xx, otherwise `RequestRefused` with what the server said."""
        if not 200 <= self.status < 300:
            raise RequestRefused(*_problem(self.status, await self.body()))
        return self


def _problem(status: int, body: bytes) -> tuple[str, int]:
    """(message, status) of an error body in OpenAI's form, or whatever the server wrote."""
    try:
        error = json.loads(body)["error"]
        return str(error.get("message", error)) if isinstance(error, dict) else str(error), status
    except (ValueError, KeyError, TypeError):
        return f"HTTP {status}: {body[:300].decode('utf-8', 'replace')}", status


@asynccontextmanager
async def request(
    address: Address, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
) -> AsyncIterator[Answer]:
    """Send one request; the answer's body may be read inside the context. Raises `ServerUnreachable`."""
    try:
        reader, writer = await _connect(address)
    except OSError as error:
        raise ServerUnreachable(f"nothing answers at {address} ({error.strerror or error})") from error
    try:
        content = b"" if body is None else json.dumps(body).encode()
        host = "localhost" if address.uds is not None else f"{address.host}:{address.port}"
        lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"Host: {host}", "Connection: close"]
        lines += [f"Content-Length: {len(content)}", "Content-Type: application/json"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + content)
        await writer.drain()
        yield await _read_head(reader)
    except (asyncio.IncompleteReadError, ConnectionError, ValueError) as error:
        raise ServerUnreachable(f"the connection to {address} broke: {error}") from error
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def _connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.uds is not None:
        return await asyncio.open_unix_connection(address.uds)
    context = ssl.create_default_context() if address.is_tls else None
    return await asyncio.open_connection(address.host, address.port, ssl=context)


async def _read_head(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    first, *lines = head.rstrip().split("\r\n")
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ValueError(f"{first[:80]!r} is no answer over HTTP")
    return Answer(int(rest[:3]), headers, reader)


def authorization(api_key: str | None) -> dict[str, str]:
    """The header that carries a key."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def get_json(address: Address, path: str, headers: Mapping[str, str] | None = None) -> Any:
    """A GET's JSON body; raises `ServerUnreachable` or `RequestRefused`."""
    async with request(address, "GET", path, headers=headers) as answer:
        return json.loads(await (await answer.check()).body())
