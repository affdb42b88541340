"""Exchange: one HTTP request and its answer on the bare ASGI callables, JSON or server-sent events.

The answer is written here and nowhere else, so that a stream costs one `send` a chunk and nothing in between.
"""

from __future__ import annotations

import asyncio
import time

from starlette.types import Receive, Scope, Send

from samovar.errors import ValidationError

Headers = list[tuple[bytes, bytes]]

_JSON: Headers = [(b"content-type", b"application/json")]
_EVENTS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"


class Exchange:
    """Reads one body; writes one answer. `is_started` turns true with the first byte of the answer."""

    __slots__ = (
        "_receive",
        "_send",
        "ended_by",
        "extra_headers",
        "is_started",
        "last_write",
        "response_id",
        "scope",
        "status",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self._receive = receive
        self._send = send
        self.is_started = False
        self.last_write = 0.0
        self.status = 0
        """What was answered; 0 before."""
        self.extra_headers: Headers = []
        self.response_id: str | None = None
        """The id of the answer, as the client sees it."""
        self.ended_by: Exception | None = None
        """Why the call is being ended from our side; set before it is cancelled."""

    def header(self, name: bytes) -> str | None:
        """The value of a request header, or None. `name` is lower case."""
        for key, value in self.scope["headers"]:
            if key == name:
                return bytes(value).decode("latin-1")
        return None

    def check_json(self) -> None:
        """Refuse a body that is not declared as JSON; browsers cannot send that type across sites unasked."""
        declared = self.header(b"content-type") or ""
        kind = declared.split(";", 1)[0].strip().lower()
        if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
            raise ValidationError(f"content-type must be application/json, got {declared[:100]!r}")

    async def read_body(self) -> bytes:
        """The whole body; its size is limited by `limits.BodyLimit`."""
        parts = []
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError("the client left before its request was complete")
            parts.append(message.get("body", b""))
            if not message.get("more_body", False):
                return b"".join(parts)

    async def wait_disconnect(self) -> None:
        """Return when the client has closed its connection. Only after `read_body`."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, status: int, body: bytes, headers: Headers = _JSON) -> None:
        """Send a complete answer."""
        self.is_started, self.status = True, status
        length = (b"content-length", str(len(body)).encode())
        head = [*headers, length, *self.extra_headers]
        await self._send({"type": "http.response.start", "status": status, "headers": head})
        await self._send({"type": "http.response.body", "body": body})

    async def start_stream(self) -> None:
        """Send the head of an event stream, once."""
        if not self.is_started:
            self.is_started, self.status = True, 200
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_EVENTS, *self.extra_headers]})

    async def write(self, chunk: bytes) -> None:
        """Send a part of the stream: whole `data:` lines or comments."""
        if not self.is_started:
            await self.start_stream()
        self.last_write = time.monotonic()
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end_stream(self, last: bytes) -> None:
        """Send the end marker (b"" where the last event is one) and finish the answer."""
        await self._send({"type": "http.response.body", "body": last})

    async def keep_alive(self, interval: float) -> None:
        """Send a comment after each `interval` seconds of silence; runs until cancelled."""
        self.last_write = time.monotonic()
        while True:
            await asyncio.sleep(max(0.01, self.last_write + interval - time.monotonic()))
            if time.monotonic() - self.last_write >= interval:
                await self.write(KEEP_ALIVE)
