"""What one connection may send before anything reads it: header bytes, header count, body bytes.

Headers are counted in the protocol, below the application, because the parser keeps all of them. Bodies are counted
as they arrive; a declared content-length is only a reason to refuse early.
"""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from samovar.errors import TooLargeError
from samovar.server.problems import RequestError, encode_error

MAX_HEADER_BYTES = 64 * 1024
MAX_HEADERS = 128


class BodyLimit:
    """Raises `TooLargeError` from `receive` once a body is over `most` bytes."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        is_too_long = declared.isdigit() and int(declared[:20]) > self._most
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            if is_too_long:
                raise self._refusal()
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self._most:
                raise self._refusal()
            return message

        await self._app(scope, counted, send)

    def _refusal(self) -> TooLargeError:
        return TooLargeError(f"the body is over {self._most} bytes (--max-body-bytes); send less")


class LimitedHttpProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol that answers 431 when the request line and headers are over their limits."""

    _header_bytes = 0
    _is_refused = False

    def on_message_begin(self) -> None:
        """A new request: count from zero."""
        self._header_bytes = 0
        super().on_message_begin()

    def data_received(self, data: bytes) -> None:
        """Feed the parser, unless the connection has been refused."""
        if not self._is_refused:
            super().data_received(data)

    def on_url(self, url: bytes) -> None:
        """Part of the request line."""
        if self._take(len(url)):
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """One header."""
        if self._take(len(name) + len(value) + 4):
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the application, unless refused."""
        if not self._is_refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Part of the body, unless refused."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """End of the request, unless refused."""
        if not self._is_refused:
            super().on_message_complete()

    def _take(self, size: int) -> bool:
        if self._is_refused:
            return False
        self._header_bytes += size
        headers: list[Any] = self.headers
        if self._header_bytes <= MAX_HEADER_BYTES and len(headers) < MAX_HEADERS:
            return True
        self._is_refused = True
        message = f"the headers are over {MAX_HEADER_BYTES} bytes or {MAX_HEADERS} fields; send fewer"
        status, body = encode_error(RequestError(431, "BadRequestError", message))
        head = f"HTTP/1.1 {status} Request Header Fields Too Large\r\ncontent-type: application/json\r\n"
        self.transport.write(f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body)
        self.transport.close()
        return False
